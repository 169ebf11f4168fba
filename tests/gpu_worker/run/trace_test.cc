// What --trace shows of whole trainings on the CPU.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gpu_worker/base/timeline.h"
#include "gpu_worker/run/worker_run.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/training/training.h"

namespace ballast::worker {
namespace {

struct Shown {
  double begin = 0;
  double end = 0;
  uint64_t step = 0;
};
using ByTrack = std::map<std::string, std::vector<Shown>>;

ByTrack SpansOf(const Timeline& timeline) {
  ByTrack spans;
  const nlohmann::json file = nlohmann::json::parse(timeline.ToJson());
  for (const nlohmann::json& event : file["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"];
    spans[event["cat"]].push_back(
        {begin, begin + event["dur"].get<double>(), event["args"]["step"]});
  }
  return spans;
}

TEST(Trace, ShowsEachPartOfAStepWithinIt) {
  std::mutex mutex;
  std::vector<ByTrack> ranks;
  RunRanks(2, [&](Collective& collective) {
    Timeline timeline({.rank = collective.rank()});
    WorkerOptions options = OptionsOf({.world_size = 2, .steps = 3});
    options.timeline = &timeline;
    const absl::Status status =
        RunWorker(options, collective, MakeLocalOptimizer, [](const StepReport&) {});
    EXPECT_TRUE(status.ok()) << status;
    const std::lock_guard lock(mutex);
    ranks.push_back(SpansOf(timeline));
  });
  ASSERT_EQ(ranks.size(), 2u);
  for (ByTrack& spans : ranks) {
    ASSERT_EQ(spans["step"].size(), 3u);
    for (const std::string track : {"compute", "reduce", "send", "update", "receive", "gather"}) {
      std::map<uint64_t, int> of_step;
      for (const Shown& span : spans[track]) {
        ++of_step[span.step];
        EXPECT_LE(span.begin, span.end) << track;
        if (span.step == 0) continue;  // The first weights.
        const Shown& step = spans["step"][span.step - 1];
        EXPECT_GE(span.begin, step.begin - 1) << track;  // A microsecond for rounding.
        EXPECT_LE(span.begin, step.end + 1) << track;
      }
      for (uint64_t step = 1; step <= 3; ++step)
        EXPECT_GE(of_step[step], 1) << track << " " << step;
    }
  }
}

}  // namespace
}  // namespace ballast::worker
