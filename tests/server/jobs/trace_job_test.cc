// TraceJob over the wire, while a job trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/grpc_refused.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

constexpr int kChunks = 3;

class TraceJobTest : public TinyJobTest {
 protected:
  TraceJobTest() : TinyJobTest(Codec::kGenerated) {}

  bool Wants(uint64_t step) {
    return service_.engine().FindJob("tiny").value()->trace().wants(step);
  }
  // The first steps that begin after this are traced.
  void AwaitStart(uint64_t first_step) {
    const int64_t limit_ns = TraceNow() + int64_t{30} * 1'000'000'000;
    while (!Wants(first_step) && TraceNow() < limit_ns) std::this_thread::yield();
    ASSERT_TRUE(Wants(first_step));
  }
};

// A call of TraceJob.
class Tracer {
 public:
  Tracer(ServiceForTests& service, const std::string& job, uint32_t steps,
         std::chrono::milliseconds limit = std::chrono::minutes(1)) {
    context_.set_deadline(std::chrono::system_clock::now() + limit);
    v1::TraceJobRequest request;
    request.set_name("jobs/" + job);
    request.set_steps(steps);
    reader_ = service.jobs().TraceJob(&context_, request);
  }

  void Cancel() { context_.TryCancel(); }
  grpc::Status Read() {
    v1::TraceJobResponse message;
    while (reader_->Read(&message)) {
      events_.insert(events_.end(), message.events().begin(), message.events().end());
    }
    return reader_->Finish();
  }
  const std::vector<v1::TraceEvent>& events() const { return events_; }
  int Count(uint64_t step, v1::TraceEventKind kind) const {
    return static_cast<int>(std::count_if(
        events_.begin(), events_.end(),
        [&](const v1::TraceEvent& event) { return event.step() == step && event.kind() == kind; }));
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::TraceJobResponse>> reader_;
  std::vector<v1::TraceEvent> events_;
};

TEST_F(TraceJobTest, TellsWhatHappenedAndWhenWeightsHadGone) {
  Tracer tracer(service_, "tiny", 2);
  ASSERT_NO_FATAL_FAILURE(AwaitStart(1));
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const grpc::Status status = tracer.Read();
  ASSERT_TRUE(status.ok()) << status.error_message();
  for (const uint64_t step : {1, 2}) {
    EXPECT_EQ(tracer.Count(step, v1::BEGUN), 1);
    EXPECT_EQ(tracer.Count(step, v1::DECIDED), 1);
    EXPECT_EQ(tracer.Count(step, v1::COMMITTED), 1);
    EXPECT_EQ(tracer.Count(step, v1::ARRIVED), 2 * kChunks);  // Two micro-steps.
    EXPECT_EQ(tracer.Count(step, v1::UPDATED), kChunks);
    EXPECT_EQ(tracer.Count(step, v1::SENT), kChunks);
  }
  EXPECT_EQ(tracer.Count(3, v1::BEGUN), 0);
  for (const v1::TraceEvent& event : tracer.events()) {
    EXPECT_EQ(event.rank(), event.chunk() == -1 ? -1 : event.chunk() == 0 ? 0 : 1);
  }
}

TEST_F(TraceJobTest, RefusesWhatCanNeverWork) {
  EXPECT_EQ(Tracer(service_, "tiny", 0).Read().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const grpc::Status many = Tracer(service_, "tiny", 1001).Read();
  EXPECT_TRUE(Refused(many, absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(Tracer(service_, "other", 1).Read().error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(TraceJobTest, AnswersWithWhatThereIsBeforeTheDeadline) {
  uint64_t step = 1;
  // A machine on which a step, or the answer, takes longer has more time for the next.
  for (std::chrono::milliseconds limit = std::chrono::seconds(2);; limit *= 4) {
    const int64_t half_ns = TraceNow() + std::chrono::nanoseconds(limit).count() / 2;
    Tracer tracer(service_, "tiny", 5, limit);
    while (!Wants(step) && TraceNow() < half_ns) std::this_thread::yield();
    Step(step);
    const bool in_time = TraceNow() < half_ns;
    const grpc::Status status = tracer.Read();
    if (!in_time || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      ASSERT_LT(limit, std::chrono::minutes(2));
      ++step;
      while (Wants(step)) std::this_thread::yield();  // The service ends that trace later.
      continue;
    }
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(tracer.Count(step, v1::COMMITTED), 1);
    break;
  }
}

TEST_F(TraceJobTest, ACallerThatGoesAwayMakesRoomForTheNext) {
  {
    Tracer gone(service_, "tiny", 1000);
    ASSERT_NO_FATAL_FAILURE(AwaitStart(1));
    const grpc::Status second = Tracer(service_, "tiny", 1).Read();
    EXPECT_EQ(second.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    gone.Cancel();
    EXPECT_EQ(gone.Read().error_code(), grpc::StatusCode::CANCELLED);
  }
  while (Wants(1)) std::this_thread::yield();
  Tracer tracer(service_, "tiny", 1);
  ASSERT_NO_FATAL_FAILURE(AwaitStart(1));
  Step(1);
  ASSERT_TRUE(tracer.Read().ok());
  EXPECT_EQ(tracer.Count(1, v1::COMMITTED), 1);
}

TEST_F(TraceJobTest, EndsWhenTheJobIsClosed) {
  Tracer tracer(service_, "tiny", 2);
  ASSERT_NO_FATAL_FAILURE(AwaitStart(1));
  Step(1);
  ASSERT_TRUE(service_.engine().CloseJob("tiny").ok());
  ASSERT_TRUE(tracer.Read().ok());
  EXPECT_EQ(tracer.Count(1, v1::COMMITTED), 1);
}

TEST_F(TraceJobTest, EndsWithTheServer) {
  Tracer tracer(service_, "tiny", 2);
  ASSERT_NO_FATAL_FAILURE(AwaitStart(1));
  service_.server().Shutdown(0);
  EXPECT_FALSE(tracer.Read().ok());
}

}  // namespace
}  // namespace ballast::server
