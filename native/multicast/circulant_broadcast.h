// Broadcasts of chunks from one host to many, in slots of one chunk per NIC, without a search for pairs of NICs.
//
// NIC 0 is the sender's. In slot i, NIC r receives from NIC r - skip[i mod q], where skip[q] is the number of NICs
// and skip[k] is half of skip[k + 1], rounded up. The sender passes on its next new chunk, every other NIC the highest
// chunk that the receiver lacks. n chunks take n - 1 + q slots and up to three more (q: the number of skips). The
// pattern is that of Traff's round-optimal broadcast (2022), which chooses the chunks in closed form.
//
// Reference implementation: tests/reference/circulant_broadcast.py.

#pragma once

#include "../types.h"

class CirculantBroadcast {
  public:
    std::vector<ChunkSend> chunk_sends;

    // All chunks with destinations must have the same holder and the same destinations.
    CirculantBroadcast(const Nics &nics, const ChunkWorkload &workload) {
        std::vector<int64_t> chunks;
        for (size_t i = 0; i < workload.host_class_of.size(); ++i)
            if (!workload.host_class_receivers[workload.host_class_of[i]].empty())
                chunks.push_back(static_cast<int64_t>(i));
        if (chunks.empty())
            return;
        const int64_t k = workload.host_class_of[chunks[0]];
        std::vector<int64_t> nic_of(nics.num_hosts, -1), nic;
        for (int64_t p = 0; p < nics.count(); ++p)
            if (!nics.ranks[p].empty())
                nic_of[nics.host[p]] = p;
        nic.push_back(nic_of[*workload.host_class_holders[k].begin()]);
        for (const int64_t host : workload.host_class_receivers[k])
            nic.push_back(nic_of[host]);
        send_all(chunks, nic);
    }

  private:
    Interruption interruption_;

    void send_all(const std::vector<int64_t> &chunks, const std::vector<int64_t> &nic) {
        const size_t count = nic.size(), n = chunks.size();
        std::vector<size_t> skips;
        for (size_t skip = count; skip > 1;)
            skips.insert(skips.begin(), skip = (skip + 1) / 2);
        const size_t q = skips.size(), first = (q - (n - 1 + q) % q) % q; // the last slot is the last one of a period
        std::vector<Bits> have(count, Bits(n));
        std::vector<std::vector<int64_t>> source(count, std::vector<int64_t>(n, -1));
        std::vector<int64_t> last_out(count, -1), last_in(count, -1);
        for (size_t i = 0; i < n; ++i)
            have[0].set(static_cast<int64_t>(i));
        size_t left = n * (count - 1), next = 0;
        std::vector<std::pair<size_t, int64_t>> landed;
        for (size_t slot = 0; left; ++slot) {
            interruption_.poll();
            landed.clear();
            for (size_t r = 1; r < count; ++r) {
                const size_t from = (r + count - skips[(slot + first) % q]) % count;
                const int64_t chunk = from || next == n ? highest(have[from], have[r]) : static_cast<int64_t>(next++);
                if (chunk < 0 || have[r].has(chunk))
                    continue;
                std::vector<int64_t> after;
                for (const int64_t earlier : {last_out[from], last_in[r]})
                    if (earlier >= 0 && (after.empty() || after[0] != earlier))
                        after.push_back(earlier);
                const int64_t send = static_cast<int64_t>(chunk_sends.size());
                chunk_sends.push_back({chunks[chunk], nic[from], nic[r], source[from][chunk], std::move(after),
                                       static_cast<double>(slot), static_cast<double>(slot + 1)});
                last_out[from] = last_in[r] = source[r][chunk] = send;
                landed.emplace_back(r, chunk);
            }
            for (const auto &[r, chunk] : landed)
                have[r].set(chunk);
            left -= landed.size();
        }
    }

    // The highest chunk that one NIC has and the other lacks, -1 for none.
    static int64_t highest(const Bits &have, const Bits &other) {
        for (size_t i = have.num_words(); i-- > 0;)
            if (const uint64_t word = have.word(i) & ~other.word(i))
                return static_cast<int64_t>(64 * i) + 63 - std::countl_zero(word);
        return -1;
    }
};
