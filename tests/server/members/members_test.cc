// Links between the services of a job, over gRPC.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ballast/v1/members.grpc.pb.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "proto/status.h"
#include "server/server.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/members/together.h"

namespace ballast::server {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kBytes = int64_t{64} << 20;

JobSpec Spec() {
  return MakeJobSpec({.group_sizes = {{1000, 24, 3000}, {700, 1, 2000}},
                      .world_size = kRanks,
                      .bucket_elements = 2048,
                      .chunk_elements = 512});
}

// Services on unix sockets, which rank r of the job has as home r % services.
class Services {
 public:
  explicit Services(int count) {
    static int made = 0;
    ++made;
    for (int m = 0; m < count; ++m) {
      addresses_.push_back("unix:" + testing::TempDir() + "ballast_m_" + std::to_string(getpid()) +
                           "_" + std::to_string(made) + "_" + std::to_string(m));
      engines_.push_back(std::make_unique<Engine>(
          EngineOptions{.memory_limit_bytes = kBytes, .threads = 1, .member_timeout_seconds = 20}));
      servers_.emplace_back();
      Start(m);
    }
  }

  void Start(int m) {
    servers_[m] = Server::Start(*engines_[m], {.listen = {addresses_[m]}}).value();
  }
  void Stop(int m) { servers_[m].reset(); }
  Engine& engine(int m) { return *engines_[m]; }
  const std::string& address(int m) const { return addresses_[m]; }
  Job& job(int m) { return drivers_[m]->job(); }
  JobDriver& member(int m) { return *drivers_[m]; }
  JobDriver& home(int rank) { return *drivers_[rank % drivers_.size()]; }

  JobSpec SpecHere() const {
    JobSpec spec = Spec();
    for (const std::string& address : addresses_) spec.members.push_back({address});
    for (int rank = 0; rank < kRanks; ++rank) {
      spec.homes.push_back(rank % static_cast<int>(addresses_.size()));
    }
    return spec;
  }
  void Create() {
    ASSERT_EQ(engines_[0]->CreateJob(SpecHere()).status(), absl::OkStatus());
    for (const auto& engine : engines_) {
      drivers_.push_back(std::make_unique<JobDriver>(engine->FindJob(Spec().name).value()));
    }
    for (const auto& driver : drivers_) driver->UploadWeights();
    for (const auto& driver : drivers_) {
      Await([&] { return !driver->job().Position().awaiting_weights; });
    }
    for (const auto& driver : drivers_) driver->AttachAll();
  }
  void Forget() { drivers_.clear(); }
  void Give(uint64_t seed) {
    for (const auto& driver : drivers_) {
      driver->BeginAll();
      driver->SendAll(seed, 0, true);
      driver->EndMicroStepAll(0);
    }
  }
  void Seal() {
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(home(rank).SealWith(rank, 1, StepVote()), std::nullopt);
    }
  }
  void AwaitCommit(uint64_t step) {
    for (int rank = 0; rank < kRanks; ++rank) home(rank).listener(rank).WaitForCommit(step);
  }
  template <typename Condition>
  static void Await(Condition&& is_so) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!is_so()) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<JobDriver>> drivers_;
};

// Servers come and go in every step: a member's, the lead's, both.
TEST(Members, TrainOverLinksThatEndInEveryStep) {
  Engine engine({.memory_limit_bytes = kBytes, .threads = 1});
  JobDriver one(engine, Spec());
  one.UploadWeights();
  one.AttachAll();
  Services services(3);
  services.Create();
  for (uint64_t step = 1; step <= 9; ++step) {
    one.SetVote({});
    one.Step(10 * step, 1);
    const std::vector<int> gone = step % 3 == 0   ? std::vector<int>{0, 1}
                                  : step % 3 == 1 ? std::vector<int>{0}
                                                  : std::vector<int>{2};
    services.Give(10 * step);
    for (const int m : gone) services.Stop(m);
    services.Seal();
    for (const int m : gone) services.Start(m);
    services.AwaitCommit(step);
  }
  ExpectTogether({&services.job(0), &services.job(1), &services.job(2)}, one.job());
}

TEST(Members, AreFreedOnceTheJobIsClosed) {
  Services services(2);
  for (int i = 0; i < 3; ++i) {
    services.Create();
    services.Forget();
    ASSERT_EQ(services.engine(0).CloseJob(Spec().name), absl::OkStatus());
    for (int m = 0; m < 2; ++m) {
      EXPECT_EQ(services.engine(m).ListJobs().size(), 0u);
      // The thread that has brought the last word may still have the job.
      Services::Await([&] { return services.engine(m).memory().used_bytes() == 0; });
    }
  }
}

TEST(Members, AreNamedIfTheyAreNotThere) {
  Services services(2);
  services.Stop(1);
  Engine engine({.memory_limit_bytes = kBytes, .threads = 1, .member_timeout_seconds = 0.3});
  const std::string address = services.address(0) + "b";
  const auto server = Server::Start(engine, {.listen = {address}}).value();
  JobSpec spec = services.SpecHere();
  spec.members[0].address = address;
  const absl::Status created = engine.CreateJob(spec).status();
  EXPECT_TRUE(absl::IsUnavailable(created));
  EXPECT_THAT(std::string(created.message()),
              testing::HasSubstr(services.address(1) + " cannot be reached from " + address));
  EXPECT_EQ(engine.memory().used_bytes(), 0);
}

TEST(Members, OfOneServiceAreRefused) {
  Services services(1);
  JobSpec spec = Spec();
  spec.members = {{services.address(0)}, {services.address(0) + " "}};
  spec.members[1].address = "unix://" + services.address(0).substr(5);
  spec.homes = {0, 1, 0, 1};
  EXPECT_TRUE(absl::IsInvalidArgument(services.engine(0).CreateJob(spec).status()));
  EXPECT_EQ(services.engine(0).ListJobs().size(), 0u);
}

// ---------------------------------------------------------------- what comes over the wire

class Call {
 public:
  explicit Call(const std::string& address)
      : stub_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        stream_(stub_.Follow(&context_)) {}
  Call& Open(const std::string& job, const Follow& follow, uint32_t format = kWordsFormat) {
    v1::FollowRequest request;
    request.mutable_open()->set_name("jobs/" + job);
    request.mutable_open()->set_format(format);
    request.mutable_open()->set_follow(Encode(follow));
    return Send(request);
  }
  Call& Word(const std::string& bytes) {
    v1::FollowRequest request;
    request.set_word(bytes);
    return Send(request);
  }
  Call& Send(const v1::FollowRequest& request) {
    stream_->Write(request);
    return *this;
  }
  absl::Status End() {
    v1::FollowResponse response;
    while (stream_->Read(&response)) {
    }
    return proto::FromGrpc(stream_->Finish());
  }

 private:
  v1::MemberService::Stub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::FollowRequest, v1::FollowResponse>> stream_;
};

TEST(Members, EndALinkWithWhatIsWrongAboutIt) {
  Services services(2);
  services.Create();
  const std::string& member = services.address(1);
  const std::string name = Spec().name;
  const Follow follow = services.job(0).FollowOf(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(Call(member).Open(name, follow, 99).End()));
  EXPECT_TRUE(absl::IsInvalidArgument(Call(member).Open("other", follow).End()));
  EXPECT_TRUE(absl::IsInvalidArgument(Call(member).Word("word").End()));
  EXPECT_TRUE(absl::IsInvalidArgument(Call(member).Send({}).End()));
  // It would be member 1's own lead.
  EXPECT_TRUE(absl::IsUnavailable(Call(services.address(0)).Open(name, follow).End()));
  // A newer link than the lead's, which the lead replaces again.
  EXPECT_EQ(ReasonOf(Call(member).Open(name, follow).Word("no word").End()),
            reason::kMalformedMessage);
  services.Give(10);
  services.Seal();
  services.AwaitCommit(1);
}

}  // namespace
}  // namespace ballast::server
