// Python binding of the loops over pipelines: checks the arrays of a pipeline, and keeps them for many calls.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "list_scheduling.h"
#include "model.h"
#include "replay.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Costs = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

namespace {

void check(bool fits, const char *what) {
    if (!fits)
        throw std::invalid_argument(std::string("PipelineModel: ") + what);
}

pipeline::Model make_model(Costs seconds, Floats bytes, Ints pp_rank, Ints src, Ints dst, Floats channel_seconds,
                           Ints load_offsets, Ints load_link, Floats load_seconds, int64_t num_microbatches) {
    pipeline::Model model;
    const int64_t num_stages = seconds.shape(0), num_edges = src.shape(0);
    check(seconds.shape(1) == 4 && static_cast<int64_t>(bytes.shape(0)) == num_stages &&
              static_cast<int64_t>(pp_rank.shape(0)) == num_stages && static_cast<int64_t>(dst.shape(0)) == num_edges &&
              static_cast<int64_t>(channel_seconds.shape(0)) == 2 * num_edges &&
              static_cast<int64_t>(load_offsets.shape(0)) == 2 * num_edges + 1 && load_link.shape(0) == load_seconds.shape(0),
          "sizes of the arrays do not fit each other");
    check(num_microbatches >= 1, "there is no microbatch");
    model.num_microbatches = num_microbatches;
    for (int64_t s = 0; s < num_stages; ++s) {
        pipeline::Stage stage{};
        for (int k = 0; k < 4; ++k)
            stage.seconds[k] = seconds.data()[4 * s + k];
        stage.bytes = bytes.data()[s], stage.pp_rank = pp_rank.data()[s];
        check(stage.pp_rank >= 0 && stage.pp_rank < num_stages, "a stage has no pp rank");
        model.num_pp_ranks = std::max(model.num_pp_ranks, stage.pp_rank + 1);
        model.stages.push_back(stage);
    }
    model.stages_of_pp_rank.resize(model.num_pp_ranks);
    for (int64_t s = 0; s < num_stages; ++s)
        model.stages_of_pp_rank[pp_rank.data()[s]].push_back(s);
    for (int64_t e = 0; e < num_edges; ++e) {
        const int64_t from = src.data()[e], to = dst.data()[e];
        check(from >= 0 && from < to && to < num_stages, "an edge has no end");
        for (int64_t c = 2 * e; c < 2 * e + 2; ++c) {
            const bool is_forward = c % 2 == 0;
            pipeline::Channel channel{is_forward ? from : to, is_forward ? to : from, channel_seconds.data()[c],
                                      pp_rank.data()[from] != pp_rank.data()[to], {}, {}, {}, {}};
            const int64_t begin = load_offsets.data()[c], end = load_offsets.data()[c + 1];
            check(begin >= 0 && begin <= end && end <= static_cast<int64_t>(load_link.shape(0)), "loads are not divided");
            for (int64_t i = begin; i < end; ++i) {
                const int64_t link = load_link.data()[i];
                check(link >= 0 && link < static_cast<int64_t>(load_link.shape(0)), "a load has no link");
                const double busy = load_seconds.data()[i];
                channel.all_links.push_back(link), channel.all_busy.push_back(busy);
                model.num_links = std::max(model.num_links, link + 1);
                if (busy != 0.0)
                    channel.links.push_back(link), channel.shares.push_back(busy / channel.seconds);
            }
            model.shares_links = model.shares_links || !channel.links.empty();
            model.channels.push_back(channel);
        }
        model.stages[from].forward_out.push_back(2 * e), model.stages[to].forward_in.push_back(2 * e);
        model.stages[to].backward_out.push_back(2 * e + 1), model.stages[from].backward_in.push_back(2 * e + 1);
    }
    return model;
}

using Order = std::vector<std::vector<int64_t>>;

// A pipeline and a number of microbatches. Computations are numbers, see model.h.
class PipelineModel {
  public:
    explicit PipelineModel(pipeline::Model model) : model_(std::move(model)) {}

    Order order(Ints max_in_flight, Floats pp_rank_bytes, Ints splits, bool forward_first, bool weights_first,
                double patience, int64_t group) const {
        check(static_cast<int64_t>(max_in_flight.shape(0)) == model_.num_stages() &&
                  static_cast<int64_t>(splits.shape(0)) == model_.num_stages() &&
                  static_cast<int64_t>(pp_rank_bytes.shape(0)) == model_.num_pp_ranks && group >= 0,
              "the policy has the wrong sizes");
        pipeline::Policy policy{{max_in_flight.data(), max_in_flight.data() + model_.num_stages()},
                                {pp_rank_bytes.data(), pp_rank_bytes.data() + model_.num_pp_ranks},
                                {splits.data(), splits.data() + model_.num_stages()},
                                forward_first, weights_first, patience, group};
        nb::gil_scoped_release release;
        return pipeline::ListScheduler(model_, policy).run();
    }

    std::vector<double> ends(const Order &order, int64_t recvs_ahead) const {
        check_order(order);
        nb::gil_scoped_release release;
        const pipeline::Actions actions = pipeline::add_transfers(model_, order, static_cast<size_t>(recvs_ahead));
        return actions.empty() ? std::vector<double>{} : pipeline::Replay(model_, actions).run();
    }

    std::vector<double> peak_bytes(const Order &order) const {
        check_order(order);
        std::vector<double> peaks;
        for (const auto &codes : order) {
            double now = 0.0, most = 0.0;
            for (const int64_t code : codes) {
                const pipeline::Computation item = model_.computation(code);
                if (item.kind == pipeline::F)
                    now += model_.stages[item.stage].bytes, most = std::max(most, now);
                else if (item.kind != pipeline::I)
                    now -= model_.stages[item.stage].bytes;
            }
            peaks.push_back(most);
        }
        return peaks;
    }

  private:
    void check_order(const Order &order) const {
        check(static_cast<int64_t>(order.size()) == model_.num_pp_ranks, "an order has the wrong number of pp ranks");
        const int64_t below = model_.num_stages() * model_.num_microbatches * 4;
        for (size_t pp_rank = 0; pp_rank < order.size(); ++pp_rank)
            for (const int64_t code : order[pp_rank])
                check(code >= 0 && code < below &&
                          model_.stages[model_.computation(code).stage].pp_rank == static_cast<int64_t>(pp_rank),
                      "an order has a computation that is not one of its pp rank");
    }

    pipeline::Model model_;
};

} // namespace

void bind_pipeline(nb::module_ &m) {
    nb::class_<PipelineModel>(m, "PipelineModel", "A pipeline with its costs, for many calls.")
        .def("__init__",
             [](PipelineModel *self, Costs seconds, Floats bytes, Ints pp_rank, Ints src, Ints dst,
                Floats channel_seconds, Ints load_offsets, Ints load_link, Floats load_seconds,
                int64_t num_microbatches) {
                 new (self) PipelineModel(make_model(seconds, bytes, pp_rank, src, dst, channel_seconds, load_offsets,
                                                     load_link, load_seconds, num_microbatches));
             },
             nb::arg("seconds"), nb::arg("bytes"), nb::arg("pp_rank"), nb::arg("src"), nb::arg("dst"),
             nb::arg("channel_seconds"), nb::arg("load_offsets"), nb::arg("load_link"), nb::arg("load_seconds"),
             nb::arg("num_microbatches"))
        .def("order", &PipelineModel::order, nb::arg("max_in_flight"), nb::arg("pp_rank_bytes"), nb::arg("splits"),
             nb::arg("forward_first"), nb::arg("weights_first"), nb::arg("patience"), nb::arg("group"),
             "The computations of each pp rank by list scheduling; incomplete if the policy deadlocks.")
        .def("ends", &PipelineModel::ends, nb::arg("order"), nb::arg("recvs_ahead"),
             "The end of the last computation of each stage, in an order of all computations; empty if it deadlocks.")
        .def("peak_bytes", &PipelineModel::peak_bytes, nb::arg("order"),
             "The most bytes that each pp rank keeps at once.");
}
