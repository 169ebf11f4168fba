// Listening, standard services, and looking at jobs.
#include "server/server.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <latch>
#include <memory>
#include <thread>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "proto/status.h"
#include "server/call_pool.h"
#include "server/stream_watch.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
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

TEST(Server, RefusesATakenAddressNamingIt) {
  const std::string socket = "unix:" + testing::TempDir() + "ballast_t_" + std::to_string(getpid());
  ServiceForTests first({.listen = {"127.0.0.1:0", socket}});
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  for (const std::string& taken : first.server().addresses()) {
    const auto second = Server::Start(engine, {.listen = {taken}});
    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(second.status().message()),
                AllOf(HasSubstr(taken), Not(HasSubstr("\n"))));
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
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("0.0.0.0:0"), HasSubstr("--insecure")));
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

TEST(Server, ShowsItsMessagesByReflection) {
  ServiceForTests service;
  const std::string path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  // file_containing_symbol is field 4, file_by_filename field 3.
  for (const std::string& request : {std::string("\x22\x15") + "ballast.v1.JobService",
                                     std::string("\x1a\x18") + "ballast/v1/ballast.proto"}) {
    const std::string file = Call(service, path, request);
    EXPECT_THAT(file, HasSubstr("ballast/v1/ballast.proto"));
    EXPECT_THAT(file, HasSubstr("max_micro_steps"));
  }
  EXPECT_THAT(Call(service, path, std::string("\x22\x01x")), HasSubstr("ask for list_services"));
  EXPECT_THAT(Call(service, path, ""), HasSubstr("ask for list_services"));
}

TEST(Server, SaysOfAMethodThatItDoesNotHaveThatThereIsNone) {
  ServiceForTests service;
  for (const std::string& path : {std::string("/ballast.v1.JobService/Nothing"),
                                  std::string("/x.Y/Z"), "/" + std::string(5000, 'm')}) {
    const grpc::Status status = CallStatus(service, path, "");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr("has no method " + path.substr(0, 128)), HasSubstr("release")));
    EXPECT_LT(status.error_message().size(), 300);
    EXPECT_FALSE(status.error_details().empty()) << "it is the service that says so";
  }
}

// A client that does not acknowledge the settings that say how many streams it may have.
TEST(Server, ClosesAConnectionWithMoreStreamsThanItMayHave) {
  ServiceForTests service;
  const std::string& address = service.server().addresses().front();
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const FileDescriptor client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(client.number(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  std::string frames = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const auto add = [&frames](uint8_t kind, uint8_t flags, uint32_t stream,
                             const std::string& payload) {
    for (const int shift : {16, 8, 0}) frames.push_back(static_cast<char>(payload.size() >> shift));
    frames.push_back(static_cast<char>(kind));
    frames.push_back(static_cast<char>(flags));
    for (const int shift : {24, 16, 8, 0}) frames.push_back(static_cast<char>(stream >> shift));
    frames += payload;
  };
  std::string headers;
  for (const auto& [key, value] : {std::pair<std::string, std::string>{":method", "POST"},
                                   {":scheme", "http"},
                                   {":path", "/ballast.v1.JobService/GetJob"},
                                   {":authority", "x"},
                                   {"content-type", "application/grpc"},
                                   {"te", "trailers"}}) {
    headers.push_back('\0');
    for (const std::string& text : {key, value}) {
      headers.push_back(static_cast<char>(text.size()));
      headers += text;
    }
  }
  constexpr uint8_t kHeaders = 1, kSettings = 4, kEndHeaders = 4;
  add(kSettings, 0, 0, "");
  for (int64_t i = 0; i <= StreamWatch::kMost; ++i) {
    add(kHeaders, kEndHeaders, static_cast<uint32_t>(2 * i + 1), headers);
  }
  ASSERT_EQ(send(client.number(), frames.data(), frames.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(frames.size()));
  pollfd polled = {.fd = client.number(), .events = POLLIN, .revents = 0};
  std::string said(1 << 16, '\0');
  ssize_t bytes = 0;
  do {
    ASSERT_EQ(poll(&polled, 1, 120'000), 1) << "it is not closed";
    bytes = recv(client.number(), said.data(), said.size(), 0);
  } while (bytes > 0);
  grpc::ClientContext context;
  v1::ListJobsResponse list;
  EXPECT_TRUE(service.jobs().ListJobs(&context, {}, &list).ok());
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
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_THAT(status.error_message(), HasSubstr("256 calls that read state in progress"));
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

TEST(Server, ShowsStateByName) {
  ServiceForTests service;
  CreateTinyJob(service, "tiny");
  grpc::ClientContext context;
  v1::ReadStateRequest request;
  request.set_name("jobs/tiny/parameters/b");
  request.set_plane(v1::MASTER);
  const auto reader = service.state().ReadState(&context, request);
  v1::ReadStateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_THAT(response.shape(), ElementsAre(40));
  ASSERT_EQ(response.data().size(), 40 * sizeof(float));
  std::vector<float> values(40);
  std::memcpy(values.data(), response.data().data(), response.data().size());
  for (int i = 0; i < 40; ++i) EXPECT_EQ(values[i], 1.5f + (44 + i) / 1024.0f);  // In chunk 1.
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());

  grpc::ClientContext summary_context;
  v1::SummarizeStateRequest summarize;
  summarize.set_name("jobs/tiny/parameters/b");
  v1::StateSummary summary;
  ASSERT_TRUE(service.state().SummarizeState(&summary_context, summarize, &summary).ok());
  EXPECT_EQ(summary.group(), "jobs/tiny/groups/decay");
  ASSERT_EQ(summary.planes_size(), 3);
  EXPECT_EQ(summary.planes(0).plane(), v1::MASTER);
  EXPECT_EQ(summary.planes(0).min(), values.front());
  EXPECT_EQ(summary.planes(0).max(), values.back());
  EXPECT_EQ(summary.planes(1).zeros(), 40);
}

TEST(Server, ChangesAGroupFromTheNextStepOn) {
  ServiceForTests service;
  CreateTinyJob(service, "tiny");
  grpc::ClientContext context;
  v1::UpdateGroupRequest request;
  request.set_name("jobs/tiny/groups/no_decay");
  request.mutable_changes()->set_lr(0.5);
  v1::ParamGroup group;
  const grpc::Status status = service.jobs().UpdateGroup(&context, request, &group);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(group.name(), "jobs/tiny/groups/no_decay");
  EXPECT_EQ(group.hyper_parameters().lr(), 0.5);
  EXPECT_EQ(group.hyper_parameters().weight_decay(), 0.1);
}

TEST(Server, SavesAndLoadsAJob) {
  ServiceForTests service;
  CreateTinyJob(service, "tiny");
  const std::string directory = testing::TempDir() + "ballast_save_" + std::to_string(getpid());
  const std::string hash = service.StateHash("tiny");
  grpc::ClientContext save_context;
  v1::SaveJobRequest save;
  save.set_name("jobs/tiny");
  save.set_directory(directory);
  v1::SaveJobResponse saved;
  const grpc::Status status = service.state().SaveJob(&save_context, save, &saved);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(saved.step(), 0);
  EXPECT_EQ(saved.directory(), directory + "/step-0.1");
  EXPECT_GT(saved.bytes(), 3 * 350 * 4);

  grpc::ClientContext load_context;
  v1::LoadJobRequest load;
  load.set_name("jobs/tiny");
  load.set_directory(directory);
  v1::LoadJobResponse loaded;
  ASSERT_TRUE(service.state().LoadJob(&load_context, load, &loaded).ok());
  EXPECT_GT(loaded.generation().count(), 1);
  EXPECT_EQ(loaded.directory(), saved.directory());
  EXPECT_EQ(service.StateHash("tiny"), hash);
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace ballast::server
