"""The script that plays a plan through time on its page. Without scripts, the page shows the whole transfer."""

#: The slider, hidden until the script runs.
CONTROLS = """<div class='play' hidden><button type='button' aria-label='play'>&#9654;</button>
<input type='range' min='0' max='1000' value='1000' aria-label='time'><output></output></div>"""
STYLE = """
.reshard .play { display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: center; }
.reshard .play[hidden] { display: none; }
.reshard .play button { font: inherit; width: 2.6em; padding: 0.2em 0; cursor: pointer; }
.reshard .play input { flex: 1 1 140px; min-width: 0; }
.reshard .play output { flex: 1 0 100%; font-size: 13px; color: var(--soft); min-height: 3em; }
.reshard .arrow.on path { stroke-dasharray: 7 4; animation: reshard-flow 0.5s linear infinite; }
@keyframes reshard-flow { to { stroke-dashoffset: -11; } }
@media (prefers-reduced-motion: reduce) { .reshard .arrow.on path { animation: none; } }
"""
SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById('progress').textContent);
  const play = document.querySelector('.play'), [button, slider, text] = play.children;
  const arrows = [...document.querySelectorAll('.arrow')], bars = [...document.querySelectorAll('.got')];
  const now = document.getElementById('now'), last = data.parts.length ? data.parts[0].length - 1 : 0;
  const widths = bars.map(bar => +bar.getAttribute('width'));
  const total = data.bytes.reduce((a, b) => a + b, 0);
  const time = s => s >= 1 ? s.toPrecision(3) + ' s' : s >= 1e-3 ? (s * 1e3).toPrecision(3) + ' ms'
    : (s * 1e6).toPrecision(3) + ' us';
  const rate = r => r >= 1e12 ? (r / 1e12).toPrecision(3) + ' TB/s'
    : r >= 1e9 ? (r / 1e9).toPrecision(3) + ' GB/s' : (r / 1e6).toPrecision(3) + ' MB/s';
  const part = (i, at) => {
    const k = Math.min(Math.floor(at), last - 1), row = data.parts[i];
    return (row[k] + (row[k + 1] - row[k]) * (at - k)) / 1000;
  };
  function show() {
    const share = slider.value / 1000, at = share * last, whole = share >= 1;
    const got = {}, need = {};
    let done = 0, speed = 0;
    data.bytes.forEach((bytes, i) => {
      const p = part(i, at), k = Math.min(Math.floor(at), last - 1);
      done += bytes * p;
      speed += bytes * (data.parts[i][k + 1] - data.parts[i][k]) / 1000;
      got[data.to[i]] = (got[data.to[i]] || 0) + bytes * p;
      need[data.to[i]] = (need[data.to[i]] || 0) + bytes;
    });
    for (const arrow of arrows) {
      const i = +arrow.dataset.i, row = data.parts[i], k = Math.min(Math.floor(at), last - 1);
      const flows = !whole && row[k + 1] > row[k];
      arrow.classList.toggle('on', flows);
      arrow.setAttribute('opacity', whole ? arrow.dataset.o : flows ? 1 : row[k] > 0 ? 0.35 : 0.08);
    }
    bars.forEach((bar, i) => bar.setAttribute('width', widths[i] * (got[bar.dataset.b] || 0) / need[bar.dataset.b]));
    now.style.left = now.dataset.end * share + '%';
    text.value = whole ? 'The whole transfer, ' + time(data.seconds) + '. Move the slider, or play it through time.'
      : time(share * data.seconds) + ' of ' + time(data.seconds) + ': ' + Math.round(100 * done / total)
        + ' % of the bytes between hosts have arrived; ' + rate(speed * last / data.seconds) + ' now';
  }
  let begun = 0;
  function step(stamp) {
    if (!begun) return;
    slider.value = Math.min(1000, (stamp - begun) / 8);
    show();
    if (+slider.value < 1000) requestAnimationFrame(step); else stop();
  }
  function stop() { begun = 0; button.textContent = '\\u25b6'; }
  button.onclick = () => {
    if (begun) return stop();
    begun = performance.now() - (+slider.value < 1000 ? slider.value * 8 : 0);
    button.textContent = '\\u275a\\u275a';
    requestAnimationFrame(step);
  };
  slider.oninput = () => { stop(); show(); };
  if (last && total) { play.hidden = false; show(); }
})();
"""
