// Listening, standard services, and looking at jobs.
#include "server/server.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <latch>
#include <memory>
#include <thread>

#include "cpu_optimizer_service/common/reason.h"
#include "proto/status.h"
#include "server/call_pool.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/server/grpc_refused.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Server, ReportsThePortThatTheSystemChose) {
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  const std::string socket = "unix:" + testing::TempDir() + "ballast_s_" + std::to_string(getpid());
  const auto server = Server::Start(engine, {.listen = {"127.0.0.1:0", socket}});
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_EQ((*server)->addresses().size(), 2);
  EXPECT_THAT((*server)->addresses()[0], AllOf(HasSubstr("127.0.0.1:"), Not("127.0.0.1:0")));
  EXPECT_EQ((*server)->addresses()[1], socket);
}

TEST(Server, TellsAtWhichAddressOtherServicesReachIt) {
  for (const std::string advertise : {"", "gpu1:7070"}) {
    ServiceForTests service({.listen = {"127.0.0.1:0"}, .advertise = advertise});
    grpc::ClientContext context;
    v1::ListJobsResponse response;
    ASSERT_TRUE(service.jobs().ListJobs(&context, {}, &response).ok());
    EXPECT_EQ(response.advertised_address(),
              advertise.empty() ? service.server().addresses()[0] : advertise);
  }
}

TEST(Server, RefusesATakenAddressNamingIt) {
  const std::string socket = "unix:" + testing::TempDir() + "ballast_t_" + std::to_string(getpid());
  ServiceForTests first({.listen = {"127.0.0.1:0", socket}});
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  for (const std::string& taken : first.server().addresses()) {
    const auto second = Server::Start(engine, {.listen = {taken}});
    EXPECT_TRUE(Refused(second.status(), absl::StatusCode::kUnavailable));
  }
  grpc::ClientContext context;
  v1::ListJobsResponse response;
  EXPECT_TRUE(first.jobs().ListJobs(&context, {}, &response).ok());
}

TEST(Server, TakesOverTheSocketOfAServiceThatDied) {
  const std::string path = testing::TempDir() + "ballast_d_" + std::to_string(getpid());
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  { ASSERT_TRUE(Server::Start(engine, {.listen = {"unix:" + path}}).ok()); }
  const auto again = Server::Start(engine, {.listen = {"unix:" + path}});
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(Server, ListensBeyondThisHostOnlyIfToldThatThisIsInsecure) {
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  const auto refused = Server::Start(engine, {.listen = {"0.0.0.0:0"}});
  EXPECT_TRUE(Refused(refused.status(), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Server::Start(engine, {.listen = {"0.0.0.0:0"}, .insecure = true}).ok());
}

// Holds up the memory of a job until the test lets it go on.
class SlowArenas final : public ArenaFactory {
 public:
  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override {
    asked.count_down();
    goes_on.wait();
    return arenas_->Create(bytes, label, touch);
  }
  std::latch asked{1};
  std::latch goes_on{1};

 private:
  std::unique_ptr<ArenaFactory> arenas_ = MakeAnonymousArenaFactory();
};

TEST(Server, ShowsAJobThatIsBeingCreatedAndHowFarItIs) {
  SlowArenas arenas;
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1, .arenas = &arenas});
  const auto server = Server::Start(engine, {});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto jobs = v1::JobService::NewStub((*server)->InProcessChannel());
  std::thread creates([&] { EXPECT_TRUE(engine.CreateJob(MakeJobSpec({}, "slow")).ok()); });
  while (!arenas.asked.try_wait()) std::this_thread::yield();
  v1::GetJobRequest get;
  get.set_name("jobs/slow");
  v1::Job job;
  {
    grpc::ClientContext context;
    EXPECT_TRUE(jobs->GetJob(&context, get, &job).ok());
  }
  EXPECT_EQ(job.phase(), v1::CREATING);
  ASSERT_EQ(job.activities_size(), 1);
  EXPECT_EQ(job.activities(0).kind(), v1::MAKING_MEMORY);
  EXPECT_EQ(job.activities(0).job(), "jobs/slow");
  EXPECT_GT(job.activities(0).total_bytes(), 0);
  v1::ListJobsResponse list;
  {
    grpc::ClientContext context;
    EXPECT_TRUE(jobs->ListJobs(&context, {}, &list).ok());
  }
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_EQ(list.jobs(0).phase(), v1::CREATING);
  EXPECT_EQ(list.activities_size(), 0);  // They are the job's.
  {
    grpc::ClientContext context;
    v1::AttachWorkerRequest attach;
    attach.set_name("jobs/slow");
    attach.set_process_id("p");
    v1::AttachWorkerResponse attached;
    const grpc::Status refused = jobs->AttachWorker(&context, attach, &attached);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(ReasonOf(proto::FromGrpc(refused)), reason::kJobBeingCreated);
  }
  arenas.goes_on.count_down();
  creates.join();
  {
    grpc::ClientContext context;
    EXPECT_TRUE(jobs->GetJob(&context, get, &job).ok());
  }
  EXPECT_EQ(job.phase(), v1::AWAITING_WEIGHTS);
  EXPECT_EQ(job.activities_size(), 0);
}

TEST(Server, SaysFarewellToItsStreamsBeforeItIsReplaced) {
  ServiceForTests service;
  CreateTinyJob(service, "tiny");
  TestWorker worker(service, "tiny", 0, Codec::kFrames);
  ASSERT_TRUE(worker.Attach().ok());
  worker.OpenStream();
  service.engine().SayFarewell();
  EXPECT_EQ(ReasonOf(proto::FromGrpc(worker.ReadUntilEnd())), reason::kRestarting);
  v1::GetJobRequest get;
  get.set_name("jobs/tiny");
  v1::Job job;
  grpc::ClientContext context;
  EXPECT_EQ(ReasonOf(proto::FromGrpc(service.jobs().GetJob(&context, get, &job))),
            reason::kRestarting);
}

// Calls a standard service, whose messages the distribution does not install.
grpc::Status CallStatus(ServiceForTests& service, const std::string& method,
                        const std::string& request, std::string* answer = nullptr) {
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice slice(request);
  grpc::GenericStub stub(service.channel());
  const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, &queue);
  void* tag;
  bool ok;
  EXPECT_TRUE(queue.Next(&tag, &ok));
  if (answer != nullptr && status.ok()) {
    grpc::Slice bytes;
    EXPECT_TRUE(response.DumpToSingleSlice(&bytes).ok());
    answer->assign(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
  }
  return status;
}
std::string Call(ServiceForTests& service, const std::string& method, const std::string& request) {
  std::string answer;
  const grpc::Status status = CallStatus(service, method, request, &answer);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return answer;
}

// HealthCheckResponse.status is field 1, SERVING 1, NOT_SERVING 2.
std::string CheckHealth(ServiceForTests& service) {
  return Call(service, "/grpc.health.v1.Health/Check", "");
}

TEST(Server, AnswersHealthChecksUntilItDrains) {
  ServiceForTests service;
  EXPECT_EQ(CheckHealth(service), "\x08\x01");
  service.server().SetServing(false);
  EXPECT_EQ(CheckHealth(service), "\x08\x02");
}

TEST(Server, ListsItsServicesByReflection) {
  ServiceForTests service;
  // ServerReflectionRequest.list_services is field 7, a string.
  const std::string services =
      Call(service, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
           std::string("\x3a\x01*"));
  for (const char* name :
       {"ballast.v1.JobService", "ballast.v1.StateService", "ballast.v1.TrainService"}) {
    EXPECT_THAT(services, HasSubstr(name));
  }
}

TEST(Server, SaysOfAMethodThatItDoesNotHaveThatThereIsNone) {
  ServiceForTests service;
  for (const std::string& path : {std::string("/ballast.v1.JobService/Nothing"),
                                  std::string("/x.Y/Z"), "/" + std::string(5000, 'm')}) {
    const grpc::Status status = CallStatus(service, path, "");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(path.substr(0, 128)));
    EXPECT_LT(status.error_message().size(), 300);
    EXPECT_FALSE(status.error_details().empty()) << "it is the service that says so";
  }
}

TEST(Server, BoundsReadersThatDoNotReadAndAnswersOtherCallsMeanwhile) {
  ServiceForTests service;
  grpc::ChannelArguments arguments;  // What is not read stays with the service.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  service.Use(grpc::CreateCustomChannel(service.server().addresses()[0],
                                        grpc::InsecureChannelCredentials(), arguments));
  constexpr int64_t kElements = 1 << 20;  // More than fits into a stream that is not read.
  v1::CreateJobRequest create;
  *create.mutable_job() = TinyJob("large", /*world_size=*/1);
  create.mutable_job()->clear_chunk_elements();
  create.mutable_job()->mutable_parameters(1)->set_shape(0, 212 + kElements);
  create.mutable_job()->mutable_partitions(1)->set_end(512 + kElements);
  grpc::ClientContext create_context;
  v1::Job created;
  ASSERT_TRUE(service.jobs().CreateJob(&create_context, create, &created).ok());
  const std::shared_ptr<Job> job = service.engine().FindJob("large").value();
  const std::vector<std::byte> zeros(kMaxChunkElements * sizeof(float));
  for (size_t i = 0; i < job->layout().chunks().size(); ++i) {
    const absl::Span<const std::byte> payload(zeros.data(),
                                              job->layout().chunks()[i].elements * sizeof(float));
    ASSERT_TRUE(job->WriteInitialWeights(i, {payload}).ok());
  }

  v1::ReadStateRequest request;
  request.set_name("jobs/large/parameters/b");
  request.set_plane(v1::MASTER);
  // Most of the places: a reader is stuck for a minute only, and so many calls may take longer.
  constexpr size_t kStuck = 64, kMore = 4;
  std::vector<CallPool::Place> taken;
  while (taken.size() < kMaxReaders - kStuck) {
    taken.push_back(service.server().pools().readers.Enter().value());
  }
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::ReadStateResponse>>> stuck;
  size_t refused = 0;
  for (size_t i = 0; i < kStuck + kMore; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    auto reader = service.state().ReadState(contexts.back().get(), request);
    v1::ReadStateResponse first;
    if (reader->Read(&first)) {
      stuck.push_back(std::move(reader));
    } else {
      const grpc::Status status = reader->Finish();
      EXPECT_TRUE(Refused(status, absl::StatusCode::kResourceExhausted));
      ++refused;
    }
  }
  EXPECT_EQ(stuck.size(), kStuck);
  EXPECT_EQ(refused, kMore);
  grpc::ClientContext list_context;
  v1::ListJobsResponse list;
  EXPECT_TRUE(service.jobs().ListJobs(&list_context, {}, &list).ok());
  EXPECT_EQ(list.jobs_size(), 1);

  for (const auto& context : contexts) context->TryCancel();
  for (const auto& reader : stuck) EXPECT_FALSE(reader->Finish().ok());
  grpc::Status status;
  do {  // Until the first of them has left.
    grpc::ClientContext context;
    v1::SummarizeStateRequest summarize;
    summarize.set_name(request.name());
    v1::StateSummary summary;
    status = service.state().SummarizeState(&context, summarize, &summary);
  } while (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(Server, DescribesItsJobs) {
  ServiceForTests service;
  CreateTinyJob(service, "tiny");
  grpc::ClientContext context;
  v1::GetJobRequest request;
  request.set_name("jobs/tiny");
  request.set_with_parameters(true);
  v1::Job job;
  ASSERT_TRUE(service.jobs().GetJob(&context, request, &job).ok());
  EXPECT_EQ(job.name(), "jobs/tiny");
  EXPECT_EQ(job.phase(), v1::READY);
  EXPECT_EQ(job.instance_id(), service.engine().instance_id());
  EXPECT_EQ(job.world_size(), 2);
  EXPECT_EQ(job.ranks(1).chunks(), 2);
  EXPECT_EQ(job.groups(0).name(), "jobs/tiny/groups/decay");
  EXPECT_EQ(job.groups(0).flat_elements(), 512);
  EXPECT_EQ(job.groups(0).parameter_count(), 2);
  EXPECT_EQ(job.groups(0).trainable_elements(), 340);
  EXPECT_EQ(job.groups(1).trainable_elements(), 10);
  EXPECT_EQ(job.parameters(1).name(), "jobs/tiny/parameters/b");
  EXPECT_EQ(job.parameters(1).offset(), 300);
  EXPECT_EQ(job.parameters(3).offset(), -1);
  EXPECT_EQ(job.partitions_size(), 3);

  grpc::ClientContext list_context;
  v1::ListJobsResponse list;
  ASSERT_TRUE(service.jobs().ListJobs(&list_context, {}, &list).ok());
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_EQ(list.jobs(0).parameters_size(), 0);
  EXPECT_EQ(list.memory_limit_bytes(), kTestMemoryBytes);
  EXPECT_EQ(list.memory_used_bytes(), job.memory().total_bytes());
}

}  // namespace
}  // namespace ballast::server
