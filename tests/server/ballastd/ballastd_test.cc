// The binary: its flags, its one-line errors, and what SIGTERM makes it do.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "proto/convert.h"
#include "tests/server/tiny_job.h"
#include "tests/support/processes.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The step of a saved checkpoint.
int SavedStep(const std::string& directory) {
  return nlohmann::json::parse(ReadFile(directory + "/index.json")).at("step");
}

// A job of one rank, with weights.
void CreateJob(const std::string& address, const std::string& name) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto jobs = v1::JobService::NewStub(channel);
  const auto train = v1::TrainService::NewStub(channel);
  JobSpec spec;
  spec.name = name;
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.parameters = {{.name = "w", .shape = {256}}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256}};
  v1::CreateJobRequest create;
  *create.mutable_job() = proto::ToProto(spec);
  v1::Job job;
  grpc::ClientContext create_context;
  ASSERT_TRUE(jobs->CreateJob(&create_context, create, &job).ok());
  v1::AttachWorkerRequest attach;
  attach.set_name("jobs/" + name);
  attach.set_process_id("p");
  v1::AttachWorkerResponse attached;
  grpc::ClientContext attach_context;
  ASSERT_TRUE(jobs->AttachWorker(&attach_context, attach, &attached).ok());
  v1::UploadWeightsResponse response;
  grpc::ClientContext upload_context;
  const auto upload = train->UploadWeights(&upload_context, &response);
  v1::UploadWeightsRequest request;
  request.mutable_open()->set_name("jobs/" + name);
  request.mutable_open()->set_uid(attached.uid());
  request.mutable_open()->set_process_id("p");
  request.mutable_open()->set_generation(attached.generation());
  upload->Write(request);
  request.mutable_weights()->set_payload(std::string(1024, '\0'));
  upload->Write(request);
  upload->WritesDone();
  ASSERT_TRUE(upload->Finish().ok());
  ASSERT_TRUE(response.job_ready());
}

// The rank of such a job, with its stream open.
class Worker {
 public:
  Worker(const std::string& address, const std::string& name)
      : channel_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        stream_(v1::TrainService::NewStub(channel_)->Train(&context_)) {
    v1::GetJobRequest get;
    get.set_name("jobs/" + name);
    v1::Job job;
    grpc::ClientContext get_context;
    EXPECT_TRUE(v1::JobService::NewStub(channel_)->GetJob(&get_context, get, &job).ok());
    v1::TrainRequest request;
    request.mutable_open()->set_name(job.name());
    request.mutable_open()->set_uid(job.uid());
    request.mutable_open()->set_process_id("p");
    request.mutable_open()->set_generation(job.generation());
    Write(request);
  }
  ~Worker() { context_.TryCancel(); }

  void Begin(uint64_t step) {
    v1::TrainRequest request;
    request.mutable_begin_step()->set_step(step);
    Write(request);
  }
  void BeginAndWait(uint64_t step) {
    Begin(step);
    v1::TrainResponse response;
    while (response.acknowledged().messages() < written_) ASSERT_TRUE(stream_->Read(&response));
  }
  void EndStep(uint64_t step) {
    v1::TrainRequest request;
    request.mutable_gradient()->mutable_header()->set_step(step);
    request.mutable_gradient()->mutable_header()->set_micro_step_end(1);
    request.mutable_gradient()->set_payload(std::string(512, '\0'));
    Write(request);
    request.mutable_end_micro_step()->set_step(step);
    request.mutable_end_micro_step()->set_all_used(true);
    Write(request);
    request.mutable_seal()->set_step(step);
    request.mutable_seal()->set_micro_steps(1);
    Write(request);
    v1::TrainResponse response;
    while (!response.has_committed()) ASSERT_TRUE(stream_->Read(&response));
    EXPECT_EQ(response.committed().step(), step);
  }
  grpc::Status ReadUntilEnd() {
    v1::TrainResponse response;
    while (stream_->Read(&response)) continue;
    return stream_->Finish();
  }

 private:
  void Write(const v1::TrainRequest& request) {
    EXPECT_TRUE(stream_->Write(request));
    ++written_;
  }

  uint64_t written_ = 0;
  grpc::ClientContext context_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
};

// Creating jobs is refused as soon as steps are.
void WaitUntilItDrains(const std::string& address) {
  const auto jobs =
      v1::JobService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::CreateJobRequest request;
  JobSpec spec;
  spec.name = "probe";
  spec.groups = {{.name = "g", .hyper_parameters = {}}};
  spec.layout.parameters = {{.name = "w", .shape = {256}}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256}};
  *request.mutable_job() = proto::ToProto(spec);
  grpc::Status status;
  do {
    grpc::ClientContext context;
    v1::Job job;
    status = jobs->CreateJob(&context, request, &job);
  } while (status.ok() || status.error_code() == grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
}

TEST(Ballastd, ExitsWithZeroOnSigtermWithoutJobs) {
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0"});
  ASSERT_NE(service.Address(), "") << service.Errors();
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_THAT(service.Errors(), HasSubstr("ballastd listening on 127.0.0.1:"));
}

TEST(Ballastd, SavesEveryJobOnSigterm) {
  const std::string checkpoints = testing::TempDir() + "ballastd_save_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + checkpoints});
  CreateJob(service.Address(), "one");
  CreateJob(service.Address(), "two");
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/one/index.json"));
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/two/master.safetensors"));
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, ReportsWhatIsLostOnSigtermWithoutACheckpointDirectory) {
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0"});
  CreateJob(service.Address(), "one");
  CreateJob(service.Address(), "two");
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 1);
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("lost job one at step 0"), HasSubstr("lost job two at step 0")));
}

TEST(Ballastd, GoesOnAfterASaveOnSigtermThatFailed) {
  const std::string checkpoints = testing::TempDir() + "ballastd_fail_" + std::to_string(getpid());
  std::filesystem::remove_all(checkpoints);
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  std::filesystem::remove_all(checkpoints);
  std::ofstream(checkpoints) << "in the way";
  service.Signal(SIGTERM);
  while (service.Errors().find("does not stop") == std::string::npos) {
    ASSERT_TRUE(service.IsRunning()) << service.Errors();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("not saved job one at step 0: "), HasSubstr(checkpoints)));
  CreateJob(address, "two");  // It takes jobs and steps again.
  Worker one(address, "one");
  one.BeginAndWait(1);
  one.EndStep(1);
  std::filesystem::remove(checkpoints);
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  EXPECT_EQ(SavedStep(checkpoints + "/two"), 0);
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, FindsOutAtItsStartThatItCannotSave) {
  for (const std::string directory : {"/proc/nowhere", "/dev/null/below"}) {
    Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + directory});
    EXPECT_EQ(service.Address(), "");
    EXPECT_EQ(service.ExitCode(), 1);
    const std::string errors = service.Errors();
    EXPECT_THAT(errors,
                HasSubstr("flag --checkpoint-dir=" + directory + ": no job could be saved"));
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  }
}

TEST(Ballastd, NeverReplacesAnEarlierJobsCheckpointByANewOnes) {
  const std::string checkpoints = testing::TempDir() + "ballastd_young_" + std::to_string(getpid());
  const std::vector<std::string> flags = {"--listen=127.0.0.1:0",
                                          "--checkpoint-dir=" + checkpoints};
  {
    Ballastd service(BALLASTD_PATH, flags);
    const std::string address = service.Address();
    CreateJob(address, "one");
    Worker one(address, "one");
    one.BeginAndWait(1);
    one.EndStep(1);
    service.Signal(SIGTERM);
    EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  }
  Ballastd service(BALLASTD_PATH, flags);
  const std::string address = service.Address();
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("found a checkpoint of job one at step 1 in " + checkpoints + "/one"),
                    HasSubstr("--resume=one")));
  const auto state =
      v1::StateService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::LoadJobRequest load;
  load.set_name("jobs/one");
  load.set_directory("one");
  v1::LoadJobResponse loaded;
  grpc::ClientContext too_early;
  EXPECT_THAT(
      state->LoadJob(&too_early, load, &loaded).error_message(),
      AllOf(HasSubstr("there is no job one; this service began "),
            HasSubstr("saved was step 1, in " + checkpoints + "/one"), HasSubstr("--resume=one")));
  CreateJob(address, "one");  // Anew, as supervised workers would.
  EXPECT_THAT(service.Errors(),
              HasSubstr("job one is new; to go on from the checkpoint at step 1"));
  service.Signal(SIGTERM);
  while (service.Errors().find("does not stop") == std::string::npos) {
    ASSERT_TRUE(service.IsRunning()) << service.Errors();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_THAT(service.Errors(), HasSubstr("has a checkpoint of another job"));
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);

  grpc::ClientContext context;
  ASSERT_TRUE(state->LoadJob(&context, load, &loaded).ok());
  EXPECT_EQ(loaded.step(), 1);
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  std::filesystem::remove_all(checkpoints);
}

// As in `ballastd 2>&1 | tee log` and Ctrl-C, which ends tee too.
TEST(Ballastd, SavesThoughNobodyReadsItsLogAnyMore) {
  const std::string directory = testing::TempDir() + "ballastd_pipe_" + std::to_string(getpid());
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  const std::string pipe = directory + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  const pid_t pid = StartProcess(
      {BALLASTD_PATH, "--listen=127.0.0.1:0", "--startup-benchmark=false",
       "--port-file=" + directory + "/port", "--checkpoint-dir=" + directory + "/saved"},
      directory + "/output", pipe);
  ASSERT_GT(pid, 0);
  std::string address;
  while (address.empty()) {
    address = ReadFile(directory + "/port");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CreateJob(address.substr(0, address.find('\n')), "one");
  close(reader);
  kill(pid, SIGINT);
  EXPECT_EQ(AwaitProcess(pid), 0);
  EXPECT_EQ(SavedStep(directory + "/saved/one"), 0);
  std::filesystem::remove_all(directory);
}

TEST(Ballastd, DrainsWhenItsTerminalCloses) {
  const std::string checkpoints = testing::TempDir() + "ballastd_hup_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=100000",
                                   "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker one(address, "one");
  one.BeginAndWait(1);
  service.Signal(SIGHUP);
  WaitUntilItDrains(address);
  service.Signal(SIGHUP);  // The shell's, after the terminal's.
  one.EndStep(1);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, DoesNotWaitForAStepThatNobodyIsThereToFinish) {
  const std::string checkpoints = testing::TempDir() + "ballastd_gone_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=100000",
                                   "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  {
    Worker one(address, "one");
    one.BeginAndWait(1);
  }
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("aborted job one: step 1 had begun, and no worker is there"),
                    HasSubstr("saved job one at step 0:")));
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, LetsAStepInProgressEndAndSavesItOnSigterm) {
  const std::string checkpoints = testing::TempDir() + "ballastd_end_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=100000",
                                   "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  CreateJob(address, "two");
  Worker one(address, "one"), two(address, "two");
  one.BeginAndWait(1);

  service.Signal(SIGTERM);
  WaitUntilItDrains(address);
  two.Begin(1);
  const grpc::Status refused = two.ReadUntilEnd();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("begins no new steps"));
  one.EndStep(1);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("saved job one at step 1:"), HasSubstr("saved job two at step 0:"),
                    Not(HasSubstr("aborted"))));
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, AbortsAStepThatDoesNotEndInTimeAndSavesTheOneBeforeOnSigterm) {
  const std::string checkpoints = testing::TempDir() + "ballastd_abort_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=0.1",
                                   "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker one(address, "one");
  one.BeginAndWait(1);
  one.EndStep(1);
  one.BeginAndWait(2);

  service.Signal(SIGTERM);
  EXPECT_EQ(one.ReadUntilEnd().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("aborted job one: step 2"), HasSubstr("saved job one at step 1:")));
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, ExitsAtOnceOnASecondSignal) {
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=100000"});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker worker(address, "one");
  worker.BeginAndWait(1);  // A step in progress that will not end.

  service.Signal(SIGTERM);
  WaitUntilItDrains(address);
  service.Signal(SIGINT);
  EXPECT_EQ(service.ExitCode(), 128 + SIGINT) << service.Errors();
}

TEST(Ballastd, TellsInOneLineWhatIsWrongWithItsFlags) {
  for (const char* flag :
       {"--no-such-flag", "--threads=many", "--threads=-1", "stray", "--memory-limit=20XB",
        "--log-level=loud", "--drain-seconds=-1", "--seal-deadline-seconds=nan",
        "--listen=", "--flagfile=x", "--shared-memory=yes"}) {
    Ballastd service(BALLASTD_PATH, {flag});
    EXPECT_EQ(service.Address(), "") << flag;
    EXPECT_EQ(service.ExitCode(), 2) << flag;
    const std::string errors = service.Errors();
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  }
}

// What a command that ends by itself writes to standard output.
std::string OutputOf(const std::string& command) {
  std::FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "cannot start " + command;
  std::string output;
  char buffer[256];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
  pclose(pipe);
  return output;
}

TEST(Ballastd, ListsItsFlags) {
  const std::string output = OutputOf(std::string(BALLASTD_PATH) + " --help");
  EXPECT_THAT(output, AllOf(HasSubstr("--listen"), HasSubstr("--shared_memory"),
                            HasSubstr("--self_benchmark")));
  // Container runtimes kill after ten seconds.
  EXPECT_THAT(output, testing::ContainsRegex("bounded\\.\\);[ \n]*default: [0-9];"));
}

TEST(Ballastd, MeasuresItsHostAndExits) {
  const std::string output =
      OutputOf(std::string(BALLASTD_PATH) + " --self-benchmark --memory-limit=64MiB");
  EXPECT_THAT(output, AllOf(HasSubstr("processors"), HasSubstr("memory traffic alone"),
                            HasSubstr("1 thread "), HasSubstr("Gparam/s")));
}

TEST(Ballastd, LogsWhatItsHostCanDoWhenItStarts) {
  Ballastd service(BALLASTD_PATH,
                   {"--listen=127.0.0.1:0", "--memory-limit=64MiB", "--startup-benchmark=true"});
  ASSERT_NE(service.Address(), "") << service.Errors();
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0);
  EXPECT_THAT(service.Errors(), HasSubstr("Gparam/s"));
}

TEST(Ballastd, TellsInOneLineWhyItCannotListen) {
  Ballastd first(BALLASTD_PATH, {"--listen=127.0.0.1:0"});
  const std::string taken = first.Address();
  for (const std::string& address : {taken, std::string("0.0.0.0:0"), std::string("nonsense")}) {
    Ballastd second(BALLASTD_PATH, {"--listen=" + address});
    EXPECT_EQ(second.Address(), "") << address;
    EXPECT_EQ(second.ExitCode(), 1) << address;
    const std::string errors = second.Errors();
    EXPECT_THAT(errors, HasSubstr(address));
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  }
}

}  // namespace
}  // namespace ballast::server
