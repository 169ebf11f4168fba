// A session's stream breaks at every point of a step, and the trainer does not notice: every
// contribution arrives once and in order, with its values, every payload is released once, every
// weight is in place. This is true through the stream and through shared memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/session/session_impl.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/model_service.h"

namespace ballast::client {
namespace {

constexpr int kChunks = 5;
constexpr size_t kNeverAcknowledges = size_t{1} << 40;
constexpr size_t kMessagesDown = 1 + kChunks + 1;  // Decision, weights, end.

// All messages that a service should have accepted in this many steps, in order.
std::vector<std::string> WholeSteps(uint64_t steps, uint32_t micro_steps) {
  std::vector<std::string> messages;
  for (uint64_t step = 1; step <= steps; ++step) {
    messages.push_back(absl::StrCat("begin ", step));
    for (uint32_t m = 0; m < micro_steps; ++m) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        messages.push_back(
            absl::StrCat("gradient ", step, " chunk ", chunk, " [", m, ", ", m + 1, ")"));
      }
      messages.push_back(absl::StrCat("end ", step, " micro-step ", m));
    }
    messages.push_back(absl::StrCat("seal ", step, " of ", micro_steps));
  }
  return messages;
}

// How gradients and weights are transported.
enum class How {
  kPayloads,
  kInPlace,  // The trainer writes to the shared memory and reads there.
  kMerged,   // And its gradients go in one message.
  kCopied,   // It has memory of its own, and some is shared.
};
struct Case {
  How how = How::kPayloads;
  uint32_t micro_steps = 1;
};

class BrokenStream : public testing::TestWithParam<Case> {
 protected:
  static constexpr uint64_t kSteps = 2;
  const How how_ = GetParam().how;
  const uint32_t micro_steps_ = GetParam().micro_steps;
  const bool in_place_ = how_ == How::kInPlace || how_ == How::kMerged;
  // Begin, each chunk (or all of them) of each micro-step, its end, and the seal.
  const size_t messages_up_ = 1 + micro_steps_ * ((how_ == How::kMerged ? 1 : kChunks) + 1) + 1;

  void SetUp() override { testing::internal::CaptureStderr(); }
  void TearDown() override { testing::internal::GetCapturedStderr(); }

  // Trains while streams break at `points`. Returns the number of streams.
  size_t Train(size_t ack_every, std::vector<BreakPoint> breaks, bool applies = true) {
    ModelService service(std::vector<size_t>(weight_bytes_.begin(), weight_bytes_.end()),
                         ack_every);
    service.breaks = std::move(breaks);
    service.applies = applies;
    service.merges = how_ == How::kMerged;
    SessionOptions options;
    options.job = SmallJob("gpt", 1);
    std::optional<MemoryFile> file;
    std::optional<SharedMemoryServerForTests> server;
    if (how_ != How::kPayloads) {
      file.emplace(RankMemoryLayout(Layout::Create(options.job.layout).value(), options.job.groups,
                                    options.rank));
      server.emplace([&](int connection) { Hand(connection, "G", {file->file()}); });
      service.memory = &*file;
      service.offer = server->offer();
    }
    std::array<std::string, kChunks> memory;
    if (!in_place_) {
      options.weights = [&](int chunk) {
        memory[chunk].resize(weight_bytes_[chunk]);
        return absl::MakeSpan(reinterpret_cast<std::byte*>(memory[chunk].data()),
                              memory[chunk].size());
      };
    }
    std::array<int, kChunks> on_weights{};
    options.on_weights = [&](int chunk) { ++on_weights[chunk]; };
    FakeClock clock;
    pushes_.clear();
    auto opened = SessionImpl::Open(std::make_unique<ModelTransport>(service), clock, options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (!opened.ok()) return 0;
    std::unique_ptr<SessionImpl> session = *std::move(opened);
    EXPECT_EQ(session->shares_memory(), how_ != How::kPayloads);
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const absl::Status status = Step(*session, service, step, applies);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) break;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const absl::Span<const std::byte> in_place = session->weights_memory(chunk);
        if (in_place_ && applies) {
          memory[chunk].assign(reinterpret_cast<const char*>(in_place.data()), in_place.size());
        }
        EXPECT_EQ(memory[chunk], applies ? service.Weights(step, chunk) : "");
        EXPECT_EQ(on_weights[chunk], applies ? static_cast<int>(step) : 0);
      }
    }
    session.reset();
    EXPECT_EQ(service.taken(), WholeSteps(kSteps, micro_steps_));
    EXPECT_THAT(service.repeats(), testing::IsEmpty());
    for (const Pushed& push : pushes_) EXPECT_EQ(push.released, 1);
    if (how_ == How::kPayloads) {
      EXPECT_EQ(service.shared(), 0u);
    } else {
      EXPECT_GE(service.shared(), kSteps * kChunks);
    }
    return service.streams();
  }

 private:
  struct Pushed {
    std::string values;
    std::atomic<int> released = 0;
  };

  absl::Status Step(Session& session, const ModelService& service, uint64_t step, bool applies) {
    BALLAST_RETURN_IF_ERROR(session.BeginStep({}));
    std::array<Pushed*, kChunks> last{};
    for (uint32_t m = 0; m < micro_steps_; ++m) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        Pushed& pushed = pushes_.emplace_back();
        pushed.values = service.Gradient(step, chunk, m);
        GradientPush push;
        push.chunk = chunk;
        push.micro_step_begin = m;
        push.micro_step_end = m + 1;
        push.final = m + 1 == micro_steps_;
        push.payload = {reinterpret_cast<const std::byte*>(pushed.values.data()),
                        pushed.values.size()};
        push.released = [&pushed] { ++pushed.released; };
        // If the service does not acknowledge, the place is still used by the previous push.
        if (in_place_ && (last[chunk] == nullptr || last[chunk]->released > 0)) {
          const absl::Span<std::byte> place = session.gradient_memory(chunk);
          std::memcpy(place.data(), pushed.values.data(), place.size());
          push.payload = place;
          last[chunk] = &pushed;
        }
        BALLAST_RETURN_IF_ERROR(session.Push(std::move(push)));
      }
      BALLAST_RETURN_IF_ERROR(session.EndMicroStep(m, {}));
    }
    BALLAST_ASSIGN_OR_RETURN(const StepDecision decision, session.Seal(micro_steps_, SmallVote()));
    EXPECT_EQ(decision.step, step);
    EXPECT_EQ(decision.applied, applies);
    EXPECT_EQ(decision.norm, static_cast<double>(step) / 4);
    return session.ReceiveWeights();
  }

  const std::array<size_t, kChunks> weight_bytes_ = {512, 512, 512, 512, 1024};
  std::deque<Pushed> pushes_;
};

INSTANTIATE_TEST_SUITE_P(Ways, BrokenStream,
                         testing::Values(Case{How::kPayloads, 2}, Case{How::kInPlace, 1},
                                         Case{How::kInPlace, 2}, Case{How::kMerged, 1},
                                         Case{How::kCopied, 1}, Case{How::kCopied, 3}),
                         [](const auto& info) {
                           const How how = info.param.how;
                           return absl::StrCat(how == How::kPayloads  ? "Payloads"
                                               : how == How::kInPlace ? "InPlace"
                                               : how == How::kMerged  ? "Merged"
                                                                      : "Copied",
                                               info.param.micro_steps);
                         });

TEST_P(BrokenStream, TrainsUndisturbedWithoutBreaks) {
  EXPECT_EQ(Train(1, {}), 1u);
  EXPECT_EQ(Train(kNeverAcknowledges, {}), 1u);
}

TEST_P(BrokenStream, AtAnyMessageUp) {
  for (size_t ack_every : {size_t{1}, size_t{3}, kNeverAcknowledges}) {
    for (size_t up = 1; up <= 2 * messages_up_; ++up) {
      for (const BreakPoint& point : {BreakPoint{.up = up}, BreakPoint{.up = up, .chunks = 2},
                                      BreakPoint{.up = up, .accepted = true},
                                      BreakPoint{.up = up, .accepted = true, .acked = true}}) {
        SCOPED_TRACE(absl::StrCat("acks every ", ack_every, ", breaks at message ", up,
                                  point.acked        ? ", acknowledged"
                                  : point.accepted   ? ", accepted"
                                  : point.chunks > 0 ? ", accepted in part"
                                                     : ", lost"));
        const size_t streams = Train(ack_every, {point});
        // After the last seal and its answers there may be no time for another stream.
        if (up < 2 * messages_up_) EXPECT_EQ(streams, 2u);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(BrokenStream, AtAnyMessageDown) {
  for (bool applies : {true, false}) {
    const size_t messages = applies ? kMessagesDown : 2;
    for (size_t ack_every : {size_t{1}, kNeverAcknowledges}) {
      for (size_t down = 1; down <= 2 * messages; ++down) {
        SCOPED_TRACE(absl::StrCat(applies ? "applied" : "skipped", ", acks every ", ack_every,
                                  ", breaks before message ", down));
        EXPECT_EQ(Train(ack_every, {{.down = down}}, applies), 2u);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(BrokenStream, AfterEveryMessage) {
  for (bool acked : {true, false}) {
    const std::vector<BreakPoint> points(2 * messages_up_,
                                         {.up = 1, .accepted = true, .acked = acked});
    EXPECT_GE(Train(1, points), 2 * messages_up_);
  }
}

TEST_P(BrokenStream, AtRandomPointsAgainAndAgain) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    std::vector<BreakPoint> points(1 + random() % 20);
    for (BreakPoint& point : points) {
      if (random() % 3 != 0) point.up = 1 + random() % 10;
      if (random() % 3 == 0) point.down = 1 + random() % 8;
      point.accepted = random() % 2 == 0;
      point.acked = point.accepted && random() % 2 == 0;
      point.chunks = static_cast<int>(random() % kChunks);
    }
    Train(random() % 2 == 0 ? 1 + random() % 5 : kNeverAcknowledges, points, random() % 4 != 0);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace ballast::client
