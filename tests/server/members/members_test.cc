// Links between the services of a job, over gRPC.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "ballast/v1/members.grpc.pb.h"
#include "client/calls/service.h"
#include "client/connect.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "proto/convert.h"
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
  static void Close(Engine& engine, const std::string& job) {
    ASSERT_EQ(ballast::Await<bool>([&](Done<bool> done) {
                return engine.CloseJob(engine.FindJob(job).value(), std::move(done), /*here=*/true);
              }).status(),
              absl::OkStatus());
  }
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

// ---------------------------------------------------------------- reads

constexpr Plane kPlanes[] = {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq};

client::Service ServiceAt(const std::string& address) {
  return client::Service(address, client::NewChannel(address, {}).value(), {}, absl::Minutes(1),
                         absl::ZeroDuration());
}

struct ReadPlane {
  absl::Status status;
  uint64_t step = 0;
  std::vector<float> values;
};
ReadPlane Read(client::Service& service, int parameter, Plane plane) {
  v1::ReadStateRequest request;
  request.set_name(proto::ParameterName(Spec().name, Spec().layout.parameters[parameter].name));
  request.set_plane(proto::ToProto(plane));
  ReadPlane read;
  read.status = service.ReadState(
      request, [&] { read.values.clear(); },
      [&](const v1::ReadStateResponse& part) {
        if (part.shape_size() > 0) read.step = part.step();
        const size_t begin = read.values.size();
        read.values.resize(begin + part.data().size() / sizeof(float));
        std::memcpy(read.values.data() + begin, part.data().data(), part.data().size());
        return absl::OkStatus();
      });
  return read;
}
std::vector<float> PlaneOf(Job& job, int parameter, Plane plane) {
  std::vector<float> values(job.layout().place(parameter).elements);
  job.TakeSnapshot({parameter}).value().Read(parameter, plane, 0, absl::MakeSpan(values));
  return values;
}

absl::StatusOr<v1::StateSummary> Summarized(client::Service& service, int parameter) {
  v1::SummarizeStateRequest request;
  request.set_name(proto::ParameterName(Spec().name, Spec().layout.parameters[parameter].name));
  return service.Call<v1::StateSummary>("StateService/SummarizeState", request);
}

// The same job on one service.
struct Alone {
  Alone() {
    driver.UploadWeights();
    driver.AttachAll();
  }
  void Step(uint64_t seed) {
    driver.SetVote({});
    driver.Step(seed, 1);
  }

  Engine engine{{.memory_limit_bytes = kBytes, .threads = 1}};
  std::unique_ptr<Server> server =
      Server::Start(engine, {.listen = {"unix:" + testing::TempDir() + "ballast_m_alone_" +
                                        std::to_string(getpid())}})
          .value();
  JobDriver driver{engine, Spec()};
};

TEST(Members, AreReadAtAnyOfThem) {
  Alone alone;
  Services services(3);
  services.Create();
  for (uint64_t step = 1; step <= 3; ++step) {
    alone.Step(10 * step);
    services.Give(10 * step);
    services.Seal();
    services.AwaitCommit(step);
  }
  client::Service one = ServiceAt(alone.server->addresses()[0]);
  for (int m = 0; m < 3; ++m) {
    client::Service service = ServiceAt(services.address(m));
    for (int p = 0; p < static_cast<int>(Spec().layout.parameters.size()); ++p) {
      for (const Plane plane : kPlanes) {
        const ReadPlane read = Read(service, p, plane);
        EXPECT_EQ(read.status, absl::OkStatus());
        EXPECT_EQ(read.step, 3u);
        EXPECT_EQ(read.values, PlaneOf(alone.driver.job(), p, plane));
      }
      const auto summary = Summarized(service, p);
      ASSERT_EQ(summary.status(), absl::OkStatus());
      EXPECT_EQ(summary->SerializeAsString(), Summarized(one, p)->SerializeAsString());
      EXPECT_EQ(proto::FromProto(summary->generation()), services.job(m).Status().generation);
    }
  }
  services.Stop(1);
  client::Service service = ServiceAt(services.address(0));
  const absl::Status read = Read(service, 2, Plane::kMaster).status;
  EXPECT_TRUE(absl::IsUnavailable(read));
  for (const absl::Status& status : {read, Summarized(service, 2).status()}) {
    EXPECT_TRUE(absl::IsUnavailable(status));
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(services.address(1)));
  }
}

// Parts of two steps are never put together.
TEST(Members, AreReadAtOneStepWhileTheyTrain) {
  constexpr int kReads = 40;
  constexpr int kParameter = 2;
  Alone alone;
  Services services(3);
  services.Create();
  std::atomic<int> reading = 3;
  std::vector<std::vector<ReadPlane>> reads(3);
  std::vector<std::thread> readers;
  for (int m = 0; m < 3; ++m) {
    readers.emplace_back([&, m] {
      client::Service service = ServiceAt(services.address(m));
      for (int i = 0; i < kReads; ++i) {
        reads[m].push_back(Read(service, kParameter, Plane::kMaster));
      }
      --reading;
    });
  }
  std::vector<std::vector<float>> expected = {
      PlaneOf(alone.driver.job(), kParameter, Plane::kMaster)};
  for (uint64_t step = 1; reading > 0; ++step) {
    alone.Step(10 * step);
    expected.push_back(PlaneOf(alone.driver.job(), kParameter, Plane::kMaster));
    services.Give(10 * step);
    services.Seal();
    services.AwaitCommit(step);
  }
  for (std::thread& reader : readers) reader.join();
  for (const std::vector<ReadPlane>& of_member : reads) {
    for (const ReadPlane& read : of_member) {
      ASSERT_EQ(read.status, absl::OkStatus());
      ASSERT_EQ(read.values, expected[read.step]) << read.step;
    }
  }
}

TEST(Members, AreNotReadIfOneHasAnotherJob) {
  Services services(2);
  services.Create();
  services.Forget();
  Services::Close(services.engine(1), Spec().name);
  JobDriver other(services.engine(1), Spec());
  other.UploadWeights();
  client::Service service = ServiceAt(services.address(0));
  EXPECT_EQ(ReasonOf(Read(service, 2, Plane::kMaster).status), reason::kOtherJob);
  EXPECT_EQ(ReasonOf(Summarized(service, 2).status()), reason::kOtherJob);
}

// ---------------------------------------------------------------- what is said of them

TEST(Members, AreShownByAnyOfThem) {
  Services services(3);
  services.Create();
  Services::Await([&] {
    for (int m = 0; m < 3; ++m) {
      const v1::Job job = ServiceAt(services.address(m)).GetJobOfAll(Spec().name).value();
      for (int other = 1; other < 3; ++other) {
        if (!(job.members(other).round_trip_seconds() > 0)) return false;
      }
    }
    return true;
  });
  for (int m = 0; m < 3; ++m) {
    client::Service service = ServiceAt(services.address(m));
    const v1::Job job = service.GetJobOfAll(Spec().name).value();
    EXPECT_EQ(job.answering_member(), m);
    EXPECT_EQ(job.home_ranks(), kRanks);
    EXPECT_EQ(job.attached_ranks(), kRanks);
    ASSERT_EQ(job.ranks_size(), kRanks);
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job.ranks(rank).rank(), rank);
    for (int other = 0; other < 3; ++other) {
      EXPECT_TRUE(job.members(other).linked());
      EXPECT_EQ(job.members(other).memory_bytes(),
                services.job(other).Status().memory.total_bytes());
    }
    // What only the lead does is done there.
    v1::UpdateGroupRequest change;
    change.set_name(proto::GroupName(Spec().name, Spec().groups[0].name));
    change.mutable_changes()->set_lr(0.5 + m);
    EXPECT_EQ(
        service.Call<v1::ParamGroup>("JobService/UpdateGroup", change)->hyper_parameters().lr(),
        0.5 + m);
  }
  services.Stop(1);
  const v1::Job job = ServiceAt(services.address(2)).GetJobOfAll(Spec().name).value();
  EXPECT_NE(job.members(1).problem(), "");
  EXPECT_EQ(job.ranks_size(), kRanks - 1);
}

TEST(Members, AreNamedWhileTheJobWaitsForThem) {
  Services services(2);
  services.Stop(1);
  std::thread creation([&] { services.Create(); });
  client::Service service = ServiceAt(services.address(0));
  Services::Await([&] {
    const auto job = service.GetJob(Spec().name, false);
    return job.ok() && job->phase() == v1::CREATING &&
           absl::StrContains(job->waits_for(), services.address(1));
  });
  services.Start(1);
  creation.join();
  const auto made = service.GetJob(Spec().name, false);
  ASSERT_EQ(made.status(), absl::OkStatus());
  EXPECT_EQ(made->waits_for(), "");
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
  // The thread of the last attempt may still have the job.
  Services::Await([&] { return engine.memory().used_bytes() == 0; });
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
