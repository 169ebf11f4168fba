// The binary: what signals, a broken job, saves and a state directory make it do.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/reason.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/server/grpc_refused.h"
#include "tests/server/tiny_job.h"
#include "tests/support/eventually.h"
#include "tests/support/processes.h"
#include "tests/support/sanitizers.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The step of the checkpoint that was saved last in the folder.
int SavedStep(const std::string& folder) {
  std::string latest = ReadFile(folder + "/latest");
  latest.pop_back();  // The end of the line.
  return nlohmann::json::parse(ReadFile(folder + "/" + latest + "/index.json")).at("step");
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
  *request.mutable_open()->mutable_generation() = attached.generation();
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
    *request.mutable_open()->mutable_generation() = job.generation();
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
    request.mutable_seal()->mutable_vote();  // To apply it.
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

// Returns when no save of the job is under way.
void AwaitSaves(const std::string& address, const std::string& name) {
  const auto jobs =
      v1::JobService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::Job job;
  do {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_name("jobs/" + name);
    ASSERT_TRUE(jobs->GetJob(&context, request, &job).ok());
  } while (job.saves_size() > 0);
}

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
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/one/step-0.1/index.json"));
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/two/step-0.1/master.safetensors"));
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
  std::filesystem::create_directory(checkpoints);  // Which the service does not do.
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  EXPECT_EQ(SavedStep(checkpoints + "/two"), 0);
  std::filesystem::remove_all(checkpoints);
}

// The process that a holder has started; 0: none is there.
pid_t ChildOf(pid_t holder) {
  const std::string task = absl::StrCat("/proc/", holder, "/task/", holder, "/children");
  return std::atoi(ReadFile(task).c_str());
}

// ps, top and killall show and find these.
TEST(Ballastd, AndItsParentHaveTitlesOfTheirOwn) {
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--threads=1"});
  ASSERT_NE(service.Address(), "") << service.Errors();
  const auto said = [](pid_t process, const char* file) {
    return ReadFile(absl::StrCat("/proc/", process, "/", file));
  };
  EXPECT_EQ(said(service.pid(), "comm"), "ballastd\n");
  EXPECT_THAT(said(service.pid(), "cmdline"), testing::StartsWith(BALLASTD_PATH));
  const pid_t child = ChildOf(service.pid());
  EXPECT_EQ(said(child, "comm"), "ballastd-serve\n");
  const std::string line = said(child, "cmdline");
  EXPECT_EQ(line.substr(0, line.find('\0')), "ballastd: service");
  EXPECT_THAT(line, HasSubstr("--threads=1"));
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
}

size_t CountOf(absl::string_view text, absl::string_view part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != absl::string_view::npos; ++at) ++count;
  return count;
}

TEST(Ballastd, KeepsJobsUntilItCanStartAgainAndForgetsAStopThatItRefused) {
  const std::string checkpoints = testing::TempDir() + "ballastd_retry_" + std::to_string(getpid());
  std::filesystem::remove_all(checkpoints);
  Ballastd service(BALLASTD_PATH,
                   {"--listen=127.0.0.1:0", "--checkpoint-dir=" + checkpoints, "--most-deaths=2"});
  const auto await_said = [&](absl::string_view what, size_t times) {
    while (CountOf(service.Errors(), what) < times) {
      ASSERT_TRUE(service.IsRunning()) << service.Errors();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  const std::string address = service.Address();
  CreateJob(address, "one");
  std::filesystem::remove_all(checkpoints);
  std::ofstream(checkpoints) << "in the way";
  service.Signal(SIGTERM);
  await_said("does not stop", 1);
  // A directory where a process that starts must write a file.
  std::filesystem::remove(service.PortFile());
  std::filesystem::create_directory(service.PortFile());
  kill(ChildOf(service.pid()), SIGKILL);
  await_said("could not start", 3);
  std::filesystem::remove(service.PortFile());
  std::filesystem::remove(checkpoints);
  std::filesystem::create_directory(checkpoints);
  await_said("ballastd listening on", 2);
  EXPECT_THAT(service.Errors(), HasSubstr("job one is back at step 0"));
  CreateJob(address, "two");
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(CountOf(service.Errors(), "signal 15: "), 2) << service.Errors();
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/one/step-0.1/index.json"));
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/two/step-0.1/index.json"));
  std::filesystem::remove_all(checkpoints);
}

// Of its parent, whose patience ends.
TEST(Ballastd, IsStartedAgainLaterAndLaterUntilItHasDiedTooOften) {
  constexpr int kDeaths = 6;
  Ballastd service(BALLASTD_PATH,
                   {"--listen=127.0.0.1:0", absl::StrCat("--most-deaths=", kDeaths)});
  CreateJob(service.Address(), "one");
  using Clock = std::chrono::steady_clock;
  pid_t last = 0;
  auto since = Clock::now();
  for (int death = 0; death < kDeaths; ++death) {
    pid_t child = 0;
    while ((child = ChildOf(service.pid())) <= 0 || child == last) {
      ASSERT_TRUE(service.IsRunning()) << service.Errors();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // None before it is started again for the first time; then 50 ms, doubled from then on.
    const int pause_ms = death < 2 ? 0 : 50 << (death - 2);
    EXPECT_GE(Clock::now() - since, std::chrono::milliseconds(pause_ms)) << "death " << death;
    since = Clock::now();
    kill(child, SIGKILL);
    last = child;
  }
  EXPECT_EQ(service.ExitCode(), 128 + SIGKILL);
  // Not by its children: LeakSanitizer has one of its own when a process ends.
  EXPECT_EQ(CountOf(service.Errors(), "it is started again over the memory that it left"),
            kDeaths - 1);
  EXPECT_THAT(service.Errors(),
              testing::EndsWith("the service ended by signal 9, the 6th time in a row; it is not "
                                "started again, and what it held is lost: go on from the last "
                                "checkpoint\n"));
}

TEST(Ballastd, SaysThatItsParentDoesNotHoldAJobForWantOfADescriptor) {
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0"});
  const std::string address = service.Address();
  const auto await_said = [&](absl::string_view what, size_t times) {
    while (CountOf(service.Errors(), what) < times) {
      ASSERT_TRUE(service.IsRunning()) << service.Errors();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  CreateJob(address, "one");
  // At the end of a child the parent reads all that this one has sent.
  kill(ChildOf(service.pid()), SIGKILL);
  await_said("job one is back at step 0", 1);
  await_said("ballastd listening on", 2);
  // Those that it has stay; it gets no more.
  rlimit before = {};
  ASSERT_EQ(prlimit(service.pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit none = {.rlim_cur = 3, .rlim_max = before.rlim_max};
  ASSERT_EQ(prlimit(service.pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  CreateJob(address, "two");
  await_said("/table is not held, and would be lost with the service's process: ", 1);
  ASSERT_EQ(prlimit(service.pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  kill(ChildOf(service.pid()), SIGKILL);
  await_said("job one is back at step 0", 2);
}

// A job of which a load did not end: the disk breaks while the state is being replaced.
class BallastdWithABrokenJob : public testing::Test {
 protected:
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime is not preloaded with another library";
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
    reads_left_.open(directory_ + "/reads_left", std::ios::binary);
    LetReads(INT64_MAX);
    setenv("LD_PRELOAD", FAILING_READS_PATH, 1);
    setenv("BALLAST_TEST_READS_LEFT", (directory_ + "/reads_left").c_str(), 1);
    service_.emplace(BALLASTD_PATH,
                     std::vector<std::string>{"--listen=127.0.0.1:0",
                                              "--checkpoint-dir=" + directory_ + "/saved"});
    unsetenv("LD_PRELOAD");
    unsetenv("BALLAST_TEST_READS_LEFT");
    address_ = service_->Address();
    ASSERT_NE(address_, "") << service_->Errors();
    const auto channel = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    jobs_ = v1::JobService::NewStub(channel);
    state_ = v1::StateService::NewStub(channel);
    CreateJob(address_, "whole");
    CreateJob(address_, "bad");
    v1::SaveJobRequest save;
    save.set_name("jobs/bad");
    v1::SaveJobResponse saved;
    grpc::ClientContext context;
    ASSERT_TRUE(state_->SaveJob(&context, save, &saved).ok());
    // A checkpoint is checked before anything is replaced: only later reads break the job.
    for (int64_t reads = 1; GetJob().phase() != v1::BROKEN; ++reads) {
      ASSERT_LT(reads, 100);
      EXPECT_THAT(GetJob().problem(), "");
      LetReads(reads);
      EXPECT_FALSE(Load().ok());
    }
    LetReads(INT64_MAX);
  }
  ~BallastdWithABrokenJob() override { std::filesystem::remove_all(directory_); }

  void LetReads(int64_t reads) {
    reads_left_.seekp(0);
    reads_left_.write(reinterpret_cast<const char*>(&reads), sizeof(reads));
    reads_left_.flush();
  }
  v1::Job GetJob() {
    v1::GetJobRequest get;
    get.set_name("jobs/bad");
    v1::Job job;
    grpc::ClientContext context;
    EXPECT_TRUE(jobs_->GetJob(&context, get, &job).ok());
    return job;
  }
  absl::Status Load() {
    v1::LoadJobRequest load;
    load.set_name("jobs/bad");
    v1::LoadJobResponse loaded;
    grpc::ClientContext context;
    return proto::FromGrpc(state_->LoadJob(&context, load, &loaded));
  }

  const std::string directory_ = testing::TempDir() + "ballastd_broken_" + std::to_string(getpid());
  std::ofstream reads_left_;
  std::optional<Ballastd> service_;
  std::string address_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::StateService::Stub> state_;
};

TEST_F(BallastdWithABrokenJob, SaysSoAndWhatHelps) {
  const v1::Job job = GetJob();
  EXPECT_TRUE(Says(job.problem()));
  EXPECT_EQ(job.found_checkpoint().step(), 0);
  EXPECT_THAT(job.found_checkpoint().directory(), HasSubstr("/saved/bad/step-0."));
  v1::ListJobsResponse list;
  grpc::ClientContext list_context;
  ASSERT_TRUE(jobs_->ListJobs(&list_context, {}, &list).ok());
  ASSERT_EQ(list.jobs_size(), 2);
  EXPECT_EQ(list.jobs(0).problem(), job.problem());
  EXPECT_EQ(list.jobs(1).phase(), v1::READY);

  v1::SaveJobRequest save;
  save.set_name("jobs/bad");
  v1::SaveJobResponse saved;
  grpc::ClientContext save_context;
  EXPECT_TRUE(Refused(state_->SaveJob(&save_context, save, &saved),
                      absl::StatusCode::kFailedPrecondition, reason::kJobBroken));

  ASSERT_TRUE(Load().ok());
  EXPECT_EQ(GetJob().phase(), v1::READY);
  EXPECT_EQ(GetJob().problem(), "");
}

TEST_F(BallastdWithABrokenJob, EndsOnSigtermAndCountsItAsLost) {
  service_->Signal(SIGTERM);
  EXPECT_EQ(service_->ExitCode(), 1) << service_->Errors();
  EXPECT_THAT(service_->Errors(),
              AllOf(HasSubstr("lost job bad at step 0: the state of job bad is torn"),
                    HasSubstr("; its last checkpoint is that of step 0 in " + directory_),
                    HasSubstr("job whole: saved step 0 in"), Not(HasSubstr("not saved"))));
}

TEST(Ballastd, SavesAndClosesAJobThatNoRankHasHadForLong) {
  const std::string checkpoints = testing::TempDir() + "ballastd_idle_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + checkpoints,
                                   "--forget-after=3s"});
  const std::string address = service.Address();
  CreateJob(address, "one");
  const std::string said = "job one closed, because it had no rank for 3s: saved at step 0 in " +
                           checkpoints + "/one/step-0.1";
  EXPECT_TRUE(Eventually([&] { return service.Errors().find(said) != std::string::npos; }))
      << service.Errors();
  CreateJob(address, "one");  // Its name is free.
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, FindsOutAtItsStartThatItCannotSave) {
  for (const std::string directory : {"/proc/nowhere", "/dev/null/below"}) {
    Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + directory});
    EXPECT_EQ(service.Address(), "");
    EXPECT_EQ(service.ExitCode(), 1);
    const std::string errors = service.Errors();
    EXPECT_TRUE(Says(absl::StripSuffix(errors, "\n")));
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  }
}

TEST(Ballastd, LeavesAnEarlierJobsCheckpointsBesideANewOnes) {
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
  EXPECT_THAT(service.Errors(), AllOf(HasSubstr("found a checkpoint of job one at step 1 in " +
                                                checkpoints + "/one/step-1.1"),
                                      HasSubstr("--resume=one")));
  const auto state =
      v1::StateService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::LoadJobRequest load;
  load.set_name("jobs/one");
  load.set_directory("one");
  v1::LoadJobResponse loaded;
  grpc::ClientContext too_early;
  EXPECT_TRUE(Refused(state->LoadJob(&too_early, load, &loaded), absl::StatusCode::kNotFound,
                      reason::kNoSuchJob));
  CreateJob(address, "one");  // Anew, as supervised workers would.
  EXPECT_THAT(service.Errors(),
              HasSubstr("job one is new; to go on from the checkpoint at step 1"));
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 0);  // Its own, beside the other's.

  Ballastd third(BALLASTD_PATH, flags);
  CreateJob(third.Address(), "one");
  const auto again = v1::StateService::NewStub(
      grpc::CreateChannel(third.Address(), grpc::InsecureChannelCredentials()));
  load.set_directory("one/step-1.1");
  grpc::ClientContext context;
  ASSERT_TRUE(again->LoadJob(&context, load, &loaded).ok());
  EXPECT_EQ(loaded.step(), 1);
  third.Signal(SIGTERM);
  EXPECT_EQ(third.ExitCode(), 0) << third.Errors();
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/one/step-1.1"));
  EXPECT_TRUE(std::filesystem::exists(checkpoints + "/one/step-1.2"));
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, SavesJobsByItselfWhileStepsGoOn) {
  const std::string checkpoints = testing::TempDir() + "ballastd_every_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + checkpoints,
                                   "--checkpoint-every=2steps,1h", "--checkpoint-keep=2"});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker one(address, "one");
  for (int step = 1; step <= 9; ++step) {
    one.BeginAndWait(step);
    one.EndStep(step);
    AwaitSaves(address, "one");  // While one is under way, the next is not begun.
  }
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints + "/one")) {
    names.insert(entry.path().filename().string());
  }
  EXPECT_EQ(names, (std::set<std::string>{"latest", "step-8.1", "step-9.1"}));
  EXPECT_THAT(service.Errors(), Not(HasSubstr("no --checkpoint-every")));
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
  signal(SIGHUP, SIG_DFL);  // It is inherited, and ignored under nohup.
  const std::string checkpoints = testing::TempDir() + "ballastd_hup_" + std::to_string(getpid());
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal), 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  // The first that its session opens becomes its terminal.
  const std::string with_terminal = std::string("exec \"$0\" \"$@\" <") + ptsname(terminal);
  Ballastd service("/usr/bin/setsid",
                   {"sh", "-c", with_terminal, BALLASTD_PATH, "--listen=127.0.0.1:0",
                    "--drain-seconds=100000", "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker one(address, "one");
  one.BeginAndWait(1);
  close(terminal);
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
                    HasSubstr("job one: saved step 0 in")));
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
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kUnavailable, reason::kStopping));
  one.EndStep(1);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_THAT(service.Errors(),
              AllOf(HasSubstr("job one: saved step 1 in"), HasSubstr("job two: saved step 0 in"),
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
              AllOf(HasSubstr("aborted job one: step 2"), HasSubstr("job one: saved step 1 in")));
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  std::filesystem::remove_all(checkpoints);
}

// As under Slurm, which signals every process of a job, and then the job's script does.
TEST(Ballastd, SavesAlthoughOneStopComesSeveralTimes) {
  const std::string checkpoints = testing::TempDir() + "ballastd_again_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=100000",
                                   "--checkpoint-dir=" + checkpoints});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker one(address, "one");
  one.BeginAndWait(1);
  service.Signal(SIGTERM);
  WaitUntilItDrains(address);
  kill(ChildOf(service.pid()), SIGTERM);
  service.Signal(SIGTERM);
  one.EndStep(1);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 1);
  std::filesystem::remove_all(checkpoints);
}

// While a signal is pending, the kernel drops another one of its number, with who sent it.
TEST(Ballastd, StopsForASignalOfItsParentThatCameBehindAnothers) {
  const std::string checkpoints = testing::TempDir() + "ballastd_merge_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--checkpoint-dir=" + checkpoints});
  CreateJob(service.Address(), "one");
  const pid_t child = ChildOf(service.pid());
  kill(child, SIGSTOP);
  kill(child, SIGTERM);
  service.Signal(SIGTERM);
  // It has been passed on once the parent sleeps, and has it no more.
  const auto is_passed_on = [&] {
    const std::string status = ReadFile(absl::StrCat("/proc/", service.pid(), "/status"));
    return status.find("State:\tS") != std::string::npos &&
           status.find("ShdPnd:\t0000000000000000") != std::string::npos;
  };
  while (!is_passed_on()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(child, SIGCONT);
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_EQ(SavedStep(checkpoints + "/one"), 0);
  std::filesystem::remove_all(checkpoints);
}

TEST(Ballastd, EndsUnsavedOnceItIsToldToAgainAndAgain) {
  Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--drain-seconds=100000"});
  const std::string address = service.Address();
  CreateJob(address, "one");
  Worker worker(address, "one");
  worker.BeginAndWait(1);  // A step in progress that will not end.

  service.Signal(SIGTERM);
  WaitUntilItDrains(address);
  while (service.IsRunning()) {
    service.Signal(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(service.ExitCode(), 128 + SIGINT) << service.Errors();
  EXPECT_THAT(service.Errors(), HasSubstr("a third one ends it unsaved"));
}

v1::Job GetJob(const std::string& address, const std::string& name) {
  const auto jobs =
      v1::JobService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::Job job;
  grpc::ClientContext context;
  v1::GetJobRequest request;
  request.set_name("jobs/" + name);
  EXPECT_TRUE(jobs->GetJob(&context, request, &job).ok());
  return job;
}

TEST(Ballastd, FindsJobsInItsDirectoryAfterTheEndOfAllItsProcesses) {
  const DirectoryInMemory memory;
  std::vector<std::string> flags = {"--listen=127.0.0.1:0", "--memory-limit=64MiB",
                                    "--state-dir=" + memory.path()};
  std::string uid;
  {
    Ballastd service(BALLASTD_PATH, flags);
    const std::string address = service.Address();
    CreateJob(address, "one");
    Worker one(address, "one");
    one.BeginAndWait(1);
    one.EndStep(1);
    uid = GetJob(address, "one").uid();
    // Said once it listens.
    while (service.Errors().find("outlives") == std::string::npos && service.IsRunning()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_THAT(service.Errors(), HasSubstr("it lies in " + memory.path() + " (tmpfs), in "));
    service.Signal(SIGKILL);  // The parent; the kernel ends its child.
  }
  flags.push_back("--holder=none");
  {
    Ballastd service(BALLASTD_PATH, flags);
    const v1::Job job = GetJob(service.Address(), "one");
    EXPECT_EQ(job.uid(), uid);
    EXPECT_EQ(job.committed_step(), 1);
    service.Signal(SIGTERM);
    EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
    EXPECT_THAT(service.Errors(),
                HasSubstr("kept in " + memory.path() + " for the next process: 1 job\n"));
  }
  {  // A start that fails closes no job.
    std::vector<std::string> failing = flags;
    failing[0] = "--listen=unix:/no/such/socket";
    Ballastd service(BALLASTD_PATH, failing);
    EXPECT_EQ(service.ExitCode(), 1) << service.Errors();
  }
  std::map<std::string, std::string> before;
  for (const auto& entry : std::filesystem::directory_iterator(memory.path())) {
    const std::string name = entry.path().filename();
    if (name.find(".record_1.") != std::string::npos) {
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(4);
      file.put('x');
    }
    if (name != "superblock") before[entry.path()] = ReadFile(entry.path());
  }
  Ballastd service(BALLASTD_PATH, flags);
  EXPECT_EQ(service.Address(), "");
  EXPECT_EQ(service.ExitCode(), 1);
  const std::string errors = service.Errors();
  EXPECT_TRUE(Says(absl::StripSuffix(errors, "\n")));
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  for (const auto& [path, bytes] : before) EXPECT_EQ(ReadFile(path), bytes) << path;
}

// Nobody passes signals on to it, and who stops it need not be who started it.
TEST(Ballastd, WithoutAHolderStopsForASignalOfAnyProcess) {
  for (const char* signal : {"TERM", "INT"}) {
    const DirectoryInMemory memory;
    Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0", "--memory-limit=64MiB",
                                     "--state-dir=" + memory.path(), "--holder=none"});
    ASSERT_NE(service.Address(), "") << service.Errors();
    Process other({"/bin/sh", "-c", absl::StrCat("kill -", signal, " ", service.pid())});
    ASSERT_EQ(other.ExitCode(), 0) << other.Errors();
    while (service.IsRunning()) {
      ASSERT_THAT(service.Errors(), Not(HasSubstr("is left to the parent")));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  }
}

TEST(Ballastd, LogsWhatAnOperatorChangesAndWhoItWas) {
  const std::string socket = testing::TempDir() + "ballastd_audit_" + std::to_string(getpid());
  Ballastd service(BALLASTD_PATH, {"--listen=unix:" + socket, "--memory-limit=64MiB"});
  const std::string address = service.Address();
  ASSERT_NE(address, "") << service.Errors();
  CreateJob(address, "j");
  const auto jobs =
      v1::JobService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::CloseJobRequest close;
  close.set_name("jobs/j");
  for (const auto wanted : {grpc::StatusCode::OK, grpc::StatusCode::NOT_FOUND}) {
    grpc::ClientContext context;
    v1::CloseJobResponse closed;
    EXPECT_EQ(jobs->CloseJob(&context, close, &closed).error_code(), wanted);
  }
  service.Signal(SIGTERM);  // Some of the lines come after the address.
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  const std::string who = "audit: user:" + std::to_string(getuid()) + " from unix:";
  const std::string log = service.Errors();
  EXPECT_THAT(log, AllOf(HasSubstr(who), HasSubstr(": JobService.CloseJob name: \"jobs/j\": done"),
                         HasSubstr("every caller is an operator")));
  EXPECT_EQ(log.find("audit:"), log.rfind("audit:"))
      << "what changed nothing is there, too: " << log;
}

}  // namespace
}  // namespace ballast::server
