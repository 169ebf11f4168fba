// `ballast trace` with the `ballastd` binary, while a job of two ranks trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/connect.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/rank_for_tests.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"

namespace ballast::client::cli_trace_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

const std::string kBin = BALLAST_BIN_DIR;
constexpr int kRanks = 2;

class CliTraceTest : public testing::Test {
 protected:
  CliTraceTest() : directory_(testing::TempDir() + "cli_trace_test." + std::to_string(getpid())) {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  ~CliTraceTest() override {
    Stop();
    std::filesystem::remove_all(directory_);
  }

  // A job whose ranks are attached and do nothing.
  void Start(UpdateMode mode, SharedMemoryUse shared_memory = SharedMemoryUse::kAuto) {
    daemon_ = std::make_unique<Ballastd>(
        kBin + "/ballastd",
        std::vector<std::string>{"--listen=127.0.0.1:0", "--memory-limit=512MiB"});
    ASSERT_NE(daemon_->Address(), "") << daemon_->Errors();
    JobSpec job = SmallJob("gpt", kRanks);
    job.update_mode = mode;
    ForEachRank(kRanks, [&](int rank) {
      auto channel = Connect(daemon_->Address());
      ASSERT_TRUE(channel.ok()) << channel.status();
      auto joined = RankForTests::Join(*channel, job, rank, {.shared_memory = shared_memory});
      ASSERT_TRUE(joined.ok()) << joined.status();
      ranks_[rank] = *std::move(joined);
    });
  }
  // From now on the ranks train, until Stop, with a pause after each step.
  void Train(std::chrono::milliseconds pause = {}) {
    training_ = std::thread([this, pause] {
      while (!stop_) {
        ForEachRank(kRanks, [&](int rank) { EXPECT_TRUE(ranks_[rank]->Step(2, {}).ok()); });
        std::this_thread::sleep_for(pause);
      }
    });
  }
  void Stop() {
    stop_ = true;
    if (training_.joinable()) training_.join();
  }

  ProcessResult Ballast(std::vector<std::string> words) {
    words.insert(words.begin(), kBin + "/ballast");
    words.push_back("--service=" + daemon_->Address());
    return RunProcess(words, directory_);
  }
  // The one line that it prints when it fails.
  void ExpectFailure(std::vector<std::string> words, int exit_code = 1) {
    const ProcessResult result = Ballast(std::move(words));
    EXPECT_EQ(result.exit_code, exit_code);
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(std::count(result.error.begin(), result.error.end(), '\n'), 1) << result.error;
    EXPECT_TRUE(Says(absl::StripSuffix(result.error, "\n")));
  }
  // As Ballast, with more time as long as the answer does not come in it: a tenth is left for that.
  ProcessResult BallastInTime(const std::vector<std::string>& words, int seconds) {
    for (;; seconds *= 4) {
      std::vector<std::string> with_time = words;
      with_time.push_back(absl::StrCat("--timeout=", seconds));
      ProcessResult result = Ballast(with_time);
      if (seconds > 100 || !absl::StrContains(result.error, "did not answer within")) return result;
    }
  }
  // The one line that it prints when no step begins.
  std::string NothingBegun(const std::vector<std::string>& words) {
    const ProcessResult result = BallastInTime(words, 2);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(std::count(result.error.begin(), result.error.end(), '\n'), 1) << result.error;
    return result.error;
  }
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  const std::string directory_;
  std::unique_ptr<Ballastd> daemon_;
  std::unique_ptr<RankForTests> ranks_[kRanks];
  std::atomic<bool> stop_ = false;
  std::thread training_;
};

// The chunks that have such an event, by step and kind.
using ChunksOf = std::map<uint64_t, std::map<std::string, std::set<int>>>;

ChunksOf ReadChunks(const json& trace) {
  ChunksOf chunks;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "X" || event["cat"] == "step") continue;
    std::set<int>& found = chunks[event["args"]["step"]][event["cat"]];
    found.insert(event["args"]["chunk"].get<int>());
    for (const json& chunk : event["args"].value("chunks", json::array())) {
      found.insert(chunk.get<int>());
    }
  }
  return chunks;
}

TEST_F(CliTraceTest, WritesWhatHappenedToEveryChunk) {
  ASSERT_NO_FATAL_FAILURE(Start(UpdateMode::kWait, SharedMemoryUse::kNever));
  Train();
  const std::string file = Path("trace.json");
  const ProcessResult result = Ballast({"trace", "gpt", "--steps", "3", "--out", file});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("events of job gpt to " + file), HasSubstr("ui.perfetto.dev")));
  const std::string text = ReadFile(file);
  ASSERT_TRUE(json::accept(text)) << text.substr(0, 1000);
  const json trace = json::parse(text);
  const auto events =
      std::count_if(trace["traceEvents"].begin(), trace["traceEvents"].end(),
                    [](const json& event) { return event["ph"] != "M"; });  // Names of tracks.
  EXPECT_THAT(result.output, HasSubstr("wrote " + std::to_string(events) + " events of job gpt"));
  EXPECT_EQ(trace["otherData"]["dropped_events"], 0);
  const ChunksOf chunks = ReadChunks(trace);
  ASSERT_EQ(chunks.size(), 3u);
  const std::set<int> all = {0, 1, 2, 3, 4};
  for (const auto& [step, kinds] : chunks) {
    for (const char* kind : {"arrived", "summed", "updated", "sent"}) {
      EXPECT_EQ(kinds.count(kind) == 0 ? std::set<int>() : kinds.at(kind), all)
          << kind << " in step " << step;
    }
    for (const char* instant : {"begun", "decided", "committed"}) {
      const std::string name = "step " + std::to_string(step) + " " + instant;
      EXPECT_THAT(text, HasSubstr("\"name\":\"" + name + "\"")) << name;
    }
  }
}

TEST_F(CliTraceTest, WritesWhatThereIsWhenTimeIsUp) {
  ASSERT_NO_FATAL_FAILURE(Start(UpdateMode::kWait));
  Train(std::chrono::milliseconds(200));  // Far from 1000 steps in any time that it may get.
  const ProcessResult result =
      BallastInTime({"trace", "gpt", "--steps", "1000", "--out", Path("t.json")}, 8);
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr(" of 1000 steps were committed in this time\n"));
  EXPECT_TRUE(json::accept(ReadFile(Path("t.json"))));
}

TEST_F(CliTraceTest, RefusesWhatCannotWorkInOneLine) {
  ASSERT_NO_FATAL_FAILURE(Start(UpdateMode::kWait));
  const std::string out = Path("t.json");
  ExpectFailure({"trace", "gtp", "--out", out});
  ExpectFailure({"trace", "gpt", "--out", Path("none/t.json")});
  ExpectFailure({"trace", "gpt", "--out", directory_});
  ExpectFailure({"trace", "gpt"}, 2);
  for (const char* steps : {"0", "1001", "1.5", "-1", "nan"}) {
    ExpectFailure({"trace", "gpt", "--out", out, "--steps", steps}, 2);
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

}  // namespace
}  // namespace ballast::client::cli_trace_test
