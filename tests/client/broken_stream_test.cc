// A session's stream breaks at every point of a step, and nobody can tell: every contribution
// arrives once and in order, every payload comes back once, every weight is in place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/session_impl.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/model_service.h"

namespace ballast::client {
namespace {

constexpr int kChunks = 5;
constexpr uint32_t kMicroSteps = 2;
constexpr size_t kNeverAcknowledges = size_t{1} << 40;
// Begin, each chunk of each micro-step, its end, and the seal.
constexpr size_t kMessagesUp = 1 + kMicroSteps * (kChunks + 1) + 1;
constexpr size_t kMessagesDown = 1 + kChunks + 1;  // Decision, weights, end.

// Everything that a service should have taken in so many steps, in order.
std::vector<std::string> WholeSteps(uint64_t steps) {
  std::vector<std::string> messages;
  for (uint64_t step = 1; step <= steps; ++step) {
    messages.push_back(absl::StrCat("begin ", step));
    for (uint32_t m = 0; m < kMicroSteps; ++m) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        messages.push_back(
            absl::StrCat("gradient ", step, " chunk ", chunk, " [", m, ", ", m + 1, ")"));
      }
      messages.push_back(absl::StrCat("end ", step, " micro-step ", m));
    }
    messages.push_back(absl::StrCat("seal ", step, " of ", kMicroSteps));
  }
  return messages;
}

class BrokenStream : public testing::Test {
 protected:
  static constexpr uint64_t kSteps = 2;

  void SetUp() override { testing::internal::CaptureStderr(); }
  void TearDown() override { testing::internal::GetCapturedStderr(); }

  // Trains, while streams break as said; the streams that it took.
  size_t Train(size_t ack_every, std::vector<BreakPoint> breaks, bool applies = true) {
    ModelService service(std::vector<size_t>(weight_bytes_.begin(), weight_bytes_.end()),
                         ack_every);
    service.breaks = std::move(breaks);
    service.applies = applies;
    FakeClock clock;
    SessionOptions options;
    options.job = SmallJob("gpt", 1);
    std::array<std::string, kChunks> memory;
    options.weights = [&](int chunk) {
      memory[chunk].resize(weight_bytes_[chunk]);
      return absl::MakeSpan(reinterpret_cast<std::byte*>(memory[chunk].data()),
                            memory[chunk].size());
    };
    std::array<int, kChunks> on_weights{};
    options.on_weights = [&](int chunk) { ++on_weights[chunk]; };
    std::array<std::array<std::atomic<int>, kChunks * kMicroSteps>, kSteps> released{};
    auto session = SessionImpl::Open(std::make_unique<ModelTransport>(service), clock, options);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return 0;
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const absl::Status status = Step(**session, step, applies, released[step - 1].data());
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) break;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        EXPECT_EQ(memory[chunk], applies ? service.Weights(step, chunk) : "");
        EXPECT_EQ(on_weights[chunk], applies ? static_cast<int>(step) : 0);
      }
    }
    session->reset();
    EXPECT_EQ(service.taken(), WholeSteps(kSteps));
    EXPECT_THAT(service.repeats(), testing::IsEmpty());
    for (const auto& step : released) {
      for (const std::atomic<int>& count : step) EXPECT_EQ(count, 1);
    }
    return service.streams();
  }

 private:
  absl::Status Step(Session& session, uint64_t step, bool applies, std::atomic<int>* released) {
    BALLAST_RETURN_IF_ERROR(session.BeginStep({}));
    for (uint32_t m = 0; m < kMicroSteps; ++m) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        GradientPush push;
        push.chunk = chunk;
        push.micro_step_begin = m;
        push.micro_step_end = m + 1;
        push.payload = absl::MakeConstSpan(gradient_).subspan(0, weight_bytes_[chunk]);
        push.released = [released] { ++*released; };
        ++released;
        BALLAST_RETURN_IF_ERROR(session.Push(std::move(push)));
      }
      BALLAST_RETURN_IF_ERROR(session.EndMicroStep(m, {}));
    }
    BALLAST_ASSIGN_OR_RETURN(const StepDecision decision, session.Seal(kMicroSteps));
    EXPECT_EQ(decision.step, step);
    EXPECT_EQ(decision.applied, applies);
    EXPECT_EQ(decision.norm, static_cast<double>(step) / 4);
    return session.ReceiveWeights();
  }

  const std::array<size_t, kChunks> weight_bytes_ = {512, 512, 512, 512, 1024};
  const std::vector<std::byte> gradient_ = std::vector<std::byte>(1024);
};

TEST_F(BrokenStream, TrainsUndisturbedWithoutBreaks) {
  EXPECT_EQ(Train(1, {}), 1u);
  EXPECT_EQ(Train(kNeverAcknowledges, {}), 1u);
}

TEST_F(BrokenStream, AtAnyMessageUp) {
  for (size_t ack_every : {size_t{1}, size_t{3}, kNeverAcknowledges}) {
    for (size_t up = 1; up <= 2 * kMessagesUp; ++up) {
      for (const BreakPoint& point : {BreakPoint{.up = up}, BreakPoint{.up = up, .held = true},
                                      BreakPoint{.up = up, .held = true, .acked = true}}) {
        SCOPED_TRACE(absl::StrCat("acks every ", ack_every, ", breaks at message ", up,
                                  point.acked  ? ", acknowledged"
                                  : point.held ? ", held"
                                               : ", lost"));
        const size_t streams = Train(ack_every, {point});
        // After the last seal and its answers there may be no time for another.
        if (up < 2 * kMessagesUp) EXPECT_EQ(streams, 2u);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(BrokenStream, AtAnyMessageDown) {
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

TEST_F(BrokenStream, AfterEveryMessage) {
  for (bool acked : {true, false}) {
    const std::vector<BreakPoint> points(2 * kMessagesUp, {.up = 1, .held = true, .acked = acked});
    EXPECT_GE(Train(1, points), 2 * kMessagesUp);
  }
}

TEST_F(BrokenStream, AtRandomPointsAgainAndAgain) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    std::vector<BreakPoint> points(1 + random() % 20);
    for (BreakPoint& point : points) {
      if (random() % 3 != 0) point.up = 1 + random() % 10;
      if (random() % 3 == 0) point.down = 1 + random() % 8;
      point.held = random() % 2 == 0;
      point.acked = point.held && random() % 2 == 0;
    }
    Train(random() % 2 == 0 ? 1 + random() % 5 : kNeverAcknowledges, points, random() % 4 != 0);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace ballast::client
