// Processes of the service that die, and others that take over their memory: at each of their
// stores that a later process could see, and at random instants in the middle of an update.
//
// Each process is forked from this one, which has no threads, keeps the memory, and hands it on.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "cpu_optimizer_service/kernels/adam_redo.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

// What processes leave: with this one; or, where a directory is named, there and nowhere else.
struct Kept : std::map<std::string, FileDescriptor> {
  std::string directory;
  int64_t room_bytes = -1;  // For the next process to take over what is left; below 0: enough.
};

struct Message {
  char name[kMaxKeptName + 1] = {};
  bool keep = false;
};

// In a process that is to die: hands what it keeps to the test's.
class SocketKeeper final : public FileKeeper {
 public:
  SocketKeeper(int socket, const Kept& kept) : socket_(socket), kept_(kept) {}

  absl::Status Keep(const std::string& name, int descriptor) override {
    Send(name, descriptor);
    return absl::OkStatus();
  }
  void Drop(const std::string& name) override { Send(name, -1); }
  std::map<std::string, FileDescriptor> TakeKept() override {
    std::map<std::string, FileDescriptor> taken;
    for (const auto& [name, file] : kept_) taken.emplace(name, FileDescriptor(dup(file.number())));
    return taken;
  }

 private:
  void Send(const std::string& name, int descriptor) const {
    Message message;
    name.copy(message.name, sizeof(message.name) - 1);
    message.keep = descriptor >= 0;
    iovec piece = {.iov_base = &message, .iov_len = sizeof(message)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header = {};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    if (message.keep) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* const part = CMSG_FIRSTHDR(&header);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(part), &descriptor, sizeof(descriptor));
    }
    if (sendmsg(socket_, &header, 0) < 0) abort();
  }

  const int socket_;
  const Kept& kept_;
};

void Receive(int socket, Kept& kept) {
  for (;;) {
    Message message;
    iovec piece = {.iov_base = &message, .iov_len = sizeof(message)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header = {};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    if (recvmsg(socket, &header, MSG_DONTWAIT) <= 0) return;
    if (!message.keep) {
      kept.erase(message.name);
      continue;
    }
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof(descriptor));
    kept[message.name] = FileDescriptor(descriptor);
  }
}

struct Training {
  JobSpec spec;
  uint64_t steps = 3;
  uint32_t micro_steps = 1;
  double max_norm = 0;
  bool discards = false;  // An attempt at each step first.
  bool in_place = false;  // Ranks share memory with the first process, which nobody keeps.
  bool pins = false;      // A reader holds the state that each process begins with.
  uint64_t undoes = 0;    // This step, once it is committed for the first time. 0: none.
  uint64_t skips = 0;     // This step is voted to be abandoned. 0: none.
};

// What a worker's session does: it goes on where the service stands, as the answer to its stream's
// opening says.
class Worker {
 public:
  Worker(Engine& engine, const Training& training) : training_(training) {
    const absl::StatusOr<std::shared_ptr<Job>> found = engine.FindJob(training.spec.name);
    job_ = found.ok() ? *found : engine.CreateJob(training.spec).value();
    driver_.emplace(job_);
  }

  // The state's hash and what is told of the steps, at the end.
  std::string Train() {
    // Only what has not come yet would be missing; the job tells no one, so all is sent again.
    for (int chunk = 0; chunk < static_cast<int>(job_->layout().chunks().size()); ++chunk) {
      if (job_->Status().phase != JobPhase::kAwaitingWeights) break;
      const std::vector<float> weights = driver_->Values(chunk, 1);
      const auto* bytes = reinterpret_cast<const std::byte*>(weights.data());
      const absl::Span<const std::byte> piece(bytes, weights.size() * sizeof(float));
      (void)job_->WriteInitialWeights(chunk, {&piece, 1}).value();
    }
    for (int rank = 0; rank < job_->layout().world_size(); ++rank) Open(rank);
    UndoIfDue();
    std::vector<int> parameters(job_->spec().layout.parameters.size());
    std::iota(parameters.begin(), parameters.end(), 0);
    std::optional<Snapshot> held;
    if (training_.pins) held = job_->TakeSnapshot(parameters).value();
    while (job_->Status().committed_step < training_.steps) {
      Step();
      UndoIfDue();
    }
    const JobStatus status = job_->Status();
    std::string text = absl::StrCat(
        job_->StateHash(), " applied ", status.applied_steps, " skipped ", status.skipped_steps,
        " whole ", status.coverage_complete_steps, " generation ", ToString(status.generation));
    for (const StepRecord& record : status.recent_steps) {
      absl::StrAppend(&text, " ", record.outcome.step, ":", record.outcome.decision.norm);
    }
    return text;
  }

 private:
  // Asks in each process again, and from step to step: nothing says whether an answer was lost.
  void UndoIfDue() {
    const JobStatus status = job_->Status();
    const bool was_undone = status.generation != Generation(1);
    if (training_.undoes == 0 || (!was_undone && status.committed_step != training_.undoes)) return;
    Must(job_->UndoStep({.step = training_.undoes, .generation = 1}).status());
    if (was_undone) return;
    for (int rank = 0; rank < job_->layout().world_size(); ++rank) Open(rank);
  }
  void Open(int rank) {
    const Generation generation = job_->Status().generation;
    driver_->Attach(rank, "", job_->spec().update_mode, nullptr, generation);
    // Refused to a rank that has begun: its gradients then come in messages.
    const std::string process = absl::StrCat("process", rank);
    if (training_.in_place && driver_->GiveMemory(rank, process, generation).ok()) {
      shares_memory_.insert(rank);
    }
  }
  void Step() {
    const uint64_t step = job_->Status().committed_step + 1;
    const int ranks = job_->layout().world_size();
    for (int rank = 0; rank < ranks; ++rank) {
      RankPosition at = driver_->stream(rank).position();
      if (at.committed_step + 1 != step) at = {.committed_step = step - 1};
      if (training_.discards && at.attempt == 0) {
        if (at.open_step != step) Must(driver_->stream(rank).BeginStep({step, 0}, {}));
        Give(rank, at, {step, 0}, 7777);
        Must(driver_->stream(rank).Discard({step, 0}).status());
        at = {.committed_step = step - 1, .attempt = 1};
      }
      const StepAttempt attempt = {step, at.attempt};
      if (at.open_step != step) Must(driver_->stream(rank).BeginStep(attempt, Settings(step)));
      Give(rank, at, attempt, 100 * step);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const uint32_t attempt = training_.discards ? 1 : 0;
      const auto refusal = driver_->stream(rank)
                               .Seal({step, attempt}, training_.micro_steps,
                                     StepVote{.apply = step != training_.skips,
                                              .clipping = {.max_norm = training_.max_norm}})
                               .value();
      if (refusal.has_value()) Must(refusal->status);
    }
    for (int rank = 0; rank < ranks; ++rank) driver_->listener(rank).WaitForCommit(step);
  }
  StepSettings Settings(uint64_t step) const {
    StepSettings settings;
    settings.expected_clipping.max_norm = training_.max_norm;
    settings.overrides[0].lr = 1e-3 * static_cast<double>(step);
    settings.trainer_state = absl::StrCat("after ", step);
    return settings;
  }
  void Give(int rank, const RankPosition& at, StepAttempt attempt, uint64_t seed) {
    std::map<int64_t, uint32_t> next;
    for (const auto& delivered : at.delivered) next[delivered.chunk] = delivered.next_micro_step;
    for (uint32_t m = 0; m < training_.micro_steps; ++m) {
      for (const int chunk : job_->layout().chunks_of_rank(rank)) {
        if (next[chunk] > m) continue;
        const std::vector<std::byte> bytes =
            driver_->Encode(chunk, driver_->Values(chunk, seed + m));
        const absl::Span<const std::byte> piece(bytes);
        const bool in_place = shares_memory_.contains(rank);
        if (in_place) driver_->memory(rank).WriteGradient(chunk, piece);
        Must(driver_->stream(rank)
                 .Contribute({.step = attempt.step,
                              .attempt = attempt.attempt,
                              .chunk = chunk,
                              .micro_step_begin = m,
                              .micro_step_end = m + 1,
                              .final = m + 1 == training_.micro_steps,
                              .in_place = in_place,
                              .payload = {&piece, in_place ? 0u : 1u}})
                 .status());
      }
      if (at.open_step == attempt.step && m < at.micro_steps_ended) continue;
      Must(driver_->stream(rank).EndMicroStep(attempt, m, {}));
    }
  }
  static void Must(const absl::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "the worker was told: %s\n", status.ToString().c_str());
    _exit(3);
  }

  const Training training_;
  std::shared_ptr<Job> job_;
  std::optional<JobDriver> driver_;
  std::set<int> shares_memory_;  // Ranks.
};

struct Death {
  uint64_t at_store = 0;  // The how manyth; 0: not at a store.
  // Of this kind alone, and what comes to one before does not go on: all of them are under way.
  std::string kind;
  // Looks at a lane of an update that is under way, and ends it: 0: not so.
  int looks = 0;
};

// Returns when an update in place has come further so many times, or the process has ended.
void AwaitUpdate(pid_t child, int socket, Kept& kept, int looks) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  const RedoLane* lanes = nullptr;
  size_t count = 0;
  uint64_t last = 0;
  const auto ended = [child] {
    siginfo_t info = {};
    return waitid(P_PID, child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child;
  };
  while (looks > 0 && !ended() && std::chrono::steady_clock::now() < until) {
    if (lanes == nullptr) {
      Receive(socket, kept);
      for (const auto& [name, file] : kept) {
        if (!absl::EndsWith(name, "/redo")) continue;
        struct stat facts = {};
        if (fstat(file.number(), &facts) != 0) abort();
        void* const data = mmap(nullptr, facts.st_size, PROT_READ, MAP_SHARED, file.number(), 0);
        if (data == MAP_FAILED) abort();
        lanes = static_cast<const RedoLane*>(data);
        count = facts.st_size / sizeof(RedoLane);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      const uint64_t word = *static_cast<const volatile uint64_t*>(&lanes[i].word);
      if (word == 0 || word == last || RedoWord::Unpack(word).done == 0) continue;
      last = word;
      --looks;
    }
  }
}

// What became of a process.
struct Life {
  bool died = false;
  std::string result;  // Of one that did not.
  std::string last;    // The store at which it died.
};

Life Live(Kept& kept, const Death& death, const std::function<std::string(Engine&)>& what_it_does) {
  int ends[2];
  int pipe_ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0 || pipe(pipe_ends) != 0) abort();
  const pid_t child = fork();
  if (child == 0) {
    SocketKeeper socket_keeper(ends[1], kept);
    std::unique_ptr<StateDirectory> directory;
    if (!kept.directory.empty()) directory = StateDirectory::Open({.path = kept.directory}).value();
    FileKeeper& keeper = directory ? static_cast<FileKeeper&>(*directory) : socket_keeper;
    NamedMemory memory(keeper);
    Engine engine(
        {.memory_limit_bytes = int64_t{256} << 20, .threads = 2, .named_memory = &memory});
    std::atomic<uint64_t> stores = 0;
    std::function<void(const char*)> seam = [&](const char* what) {
      if (!death.kind.empty() && death.kind != what) return;
      if (++stores != death.at_store) {
        while (!death.kind.empty()) pause();
        return;
      }
      if (write(pipe_ends[1], what, std::strlen(what)) < 0) abort();
      kill(getpid(), SIGKILL);
    };
    if (death.at_store > 0) store_seam = &seam;
    const rlimit all = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
    if (kept.room_bytes >= 0) {
      int64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      const rlimit some = {.rlim_cur = static_cast<rlim_t>(pages * getpagesize() + kept.room_bytes),
                           .rlim_max = RLIM_INFINITY};
      setrlimit(RLIMIT_AS, &some);
    }
    const Engine::TakenOver taken = engine.TakeOverJobs();
    setrlimit(RLIMIT_AS, &all);
    for (const std::string& line : taken.lost) {
      std::fprintf(stderr, "lost: %s\n", line.c_str());
      _exit(4);
    }
    if (directory && taken.left.empty()) directory->Settle();
    const std::string result =
        taken.left.empty() ? what_it_does(engine) : absl::StrCat("left: ", taken.left.front());
    if (write(pipe_ends[1], result.data(), result.size()) < 0) abort();
    _exit(0);
  }
  close(ends[1]);
  close(pipe_ends[1]);
  if (death.looks > 0) {
    AwaitUpdate(child, ends[0], kept, death.looks);
    kill(child, SIGKILL);
  }
  Life life;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(pipe_ends[0], buffer, sizeof(buffer))) > 0;) {
    life.result.append(buffer, got);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Receive(ends[0], kept);
  close(ends[0]);
  close(pipe_ends[0]);
  life.died = WIFSIGNALED(status);
  if (life.died) life.last = std::exchange(life.result, "");
  EXPECT_TRUE(life.died || WEXITSTATUS(status) == 0) << "ended with code " << WEXITSTATUS(status);
  return life;
}

Life Live(const Training& training, Kept& kept, const Death& death) {
  return Live(kept, death, [&](Engine& engine) { return Worker(engine, training).Train(); });
}

std::string Undisturbed(const Training& training) {
  Kept kept;
  return Live(training, kept, {}).result;
}

class JobDeathTest : public testing::Test {
 protected:
  // Dies at each store in turn; and, of the process that takes over, at its `second` store. Returns
  // the kinds of stores at which one died.
  std::set<std::string> DieAtEachStore(const Training& training, uint64_t second = 0,
                                       uint64_t stride = 1, bool in_directory = false) {
    const std::string expected = Undisturbed(training);
    std::set<std::string> kinds;
    for (uint64_t at = 1;; at += stride) {
      const DirectoryInMemory directory;
      Kept kept;
      if (in_directory) kept.directory = directory.path();
      Life life = Live(training, kept, {.at_store = at});
      if (!life.died) {
        EXPECT_EQ(life.result, expected);
        return kinds;
      }
      const std::string where = absl::StrCat("died at store ", at, ", ", life.last);
      kinds.insert(life.last);
      if (second > 0) life = Live(training, kept, {.at_store = second});
      if (life.died) life = Live(training, kept, {});
      EXPECT_EQ(life.result, expected) << where;
      if (HasFailure()) return kinds;
    }
  }

  Training Small() const {
    return {.spec = MakeJobSpec({.group_sizes = {{700, 24}, {600}},
                                 .world_size = 2,
                                 .bucket_elements = 1024,
                                 .chunk_elements = 512}),
            .steps = 2};
  }
};

TEST_F(JobDeathTest, AtAnyStoreIsNotSeenInTheState) {
  const std::set<std::string> kinds = DieAtEachStore(Small());
  EXPECT_THAT(kinds,
              testing::IsSupersetOf({"a part of a record", "a record's half", "a record's flip",
                                     "a ledger's word", "an entry of the log", "the log's end",
                                     "a chunk's word", "a lane is taken", "a lane is free",
                                     "a chunk's first weights"}));
}

TEST_F(JobDeathTest, OfTheProcessThatTakesOverIsNotSeenEither) {
  for (const uint64_t second : {1, 3, 6}) DieAtEachStore(Small(), second, /*stride=*/3);
}

TEST_F(JobDeathTest, InAStepOfSeveralMicroStepsIsNotSeen) {
  Training training = Small();
  training.micro_steps = 4;
  const std::set<std::string> kinds = DieAtEachStore(training, 0, /*stride=*/2);
  EXPECT_THAT(kinds, testing::IsSupersetOf(
                         {"a sum's lane is taken", "a turn of a sum", "a sum's lane is free"}));
  DieAtEachStore(training, 4, /*stride=*/5);
}

TEST_F(JobDeathTest, AroundADiscardIsNotSeen) {
  Training training = Small();
  training.discards = true;
  DieAtEachStore(training, 0, /*stride=*/2);
}

TEST_F(JobDeathTest, WhileUpdatesAreProvisionalIsNotSeen) {
  Training training = Small();
  training.spec.update_mode = UpdateMode::kSpeculate;
  training.max_norm = 20;
  DieAtEachStore(training, 0, /*stride=*/2);
}

TEST_F(JobDeathTest, WhileAReaderHoldsTheStateIsNotSeen) {
  Training training = Small();
  training.steps = 3;
  training.pins = true;
  EXPECT_THAT(DieAtEachStore(training),
              testing::IsSupersetOf({"a new version of a chunk", "a lane is taken"}));
  training.spec.update_mode = UpdateMode::kSpeculate;
  DieAtEachStore(training, 0, /*stride=*/3);
}

TEST_F(JobDeathTest, WithoutRoomToTakeAJobOverItIsLeftToTheNextProcess) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends where memory does";
  const Training training = Small();
  const std::string expected = Undisturbed(training);
  int left = 0;
  for (const int64_t room : {0, 150 << 10, 300 << 10, 500 << 10, 700 << 10, 1 << 20}) {
    for (const bool in_directory : {false, true}) {
      const DirectoryInMemory directory;
      Kept kept;
      if (in_directory) kept.directory = directory.path();
      EXPECT_TRUE(Live(training, kept, {.at_store = 60}).died);
      kept.room_bytes = room;
      const std::string without = Live(kept, {}, [](Engine&) { return "there was room"; }).result;
      if (without == "there was room") continue;
      EXPECT_THAT(without, testing::HasSubstr("memory"));
      ++left;
      kept.room_bytes = -1;
      const auto go_on = [&](Engine& engine) -> std::string {
        if (!engine.FindJob(training.spec.name).ok()) return "the job is lost";
        return Worker(engine, training).Train();
      };
      EXPECT_EQ(Live(kept, {}, go_on).result, expected) << room << " bytes: " << without;
    }
  }
  EXPECT_GE(left, 4);
}

// Before, in and after the undo: the step is undone once, and the state is as if it never had been.
TEST_F(JobDeathTest, AroundAnUndoIsNotSeen) {
  Training training = Small();
  training.spec.keep_previous = true;
  training.undoes = 2;
  EXPECT_THAT(DieAtEachStore(training),
              testing::IsSupersetOf({"a previous version's word", "a new version of a chunk"}));
  DieAtEachStore(training, /*second=*/2, /*stride=*/5);
  training.undoes = 1;
  training.pins = true;
  DieAtEachStore(training, 0, /*stride=*/3);
  training.spec.update_mode = UpdateMode::kSpeculate;
  DieAtEachStore(training, 0, /*stride=*/4);
}

TEST_F(JobDeathTest, AroundAnUndoOfASkippedStepIsNotSeen) {
  Training training = Small();
  training.spec.keep_previous = true;
  training.steps = 3;
  training.skips = 2;
  training.undoes = 2;
  DieAtEachStore(training, 0, /*stride=*/2);
}

// A contribution that was half added when the process died.
class HalfAdded : public JobDeathTest {
 protected:
  // All ranks' contributions of the last of these are under way when it dies.
  static constexpr uint32_t kMicroSteps = 3;

  Kept DieInAllSums(const JobSpec& spec) {
    const int ranks = spec.layout.world_size;
    Kept kept;
    const Life life =
        Live(kept, {.at_store = static_cast<uint64_t>(ranks), .kind = "a turn of a sum"},
             [&](Engine& engine) {
               JobDriver driver(engine, spec);
               driver.UploadWeights();
               driver.AttachAll();
               driver.BeginAll();
               const auto send = [&](int chunk, uint32_t m) {
                 (void)driver.Send(chunk, driver.Values(chunk, m), m, m + 1 == kMicroSteps).value();
               };
               for (int chunk = 0; chunk < ranks; ++chunk) {
                 for (uint32_t m = 0; m + 1 < kMicroSteps; ++m) send(chunk, m);
               }
               std::vector<std::thread> threads;
               for (int chunk = 0; chunk < ranks; ++chunk) {
                 threads.emplace_back([&send, chunk] { send(chunk, kMicroSteps - 1); });
               }
               for (std::thread& thread : threads) thread.join();
               return std::string("it did not die");
             });
    EXPECT_TRUE(life.died) << life.result;
    return kept;
  }
  static JobSpec OneChunkForEach(int ranks) {
    return MakeJobSpec({.group_sizes = {{512 * ranks}},
                        .world_size = ranks,
                        .bucket_elements = 512 * ranks,
                        .chunk_elements = 512});
  }
};

TEST_F(HalfAdded, IsCompletedByTheSameContributionAlone) {
  const JobSpec spec = OneChunkForEach(1);
  Kept kept = DieInAllSums(spec);
  const Life life = Live(kept, {}, [&](Engine& engine) -> std::string {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    JobDriver driver(job);
    driver.Attach(0, "", spec.update_mode, nullptr, job->Status().generation);
    RankStream& stream = driver.stream(0);
    const std::vector<std::byte> bytes = driver.Encode(0, driver.Values(0, kMicroSteps - 1));
    const absl::Span<const std::byte> piece(bytes);
    const auto contribute = [&](uint32_t end, bool empty) {
      return stream
          .Contribute({.step = 1,
                       .chunk = 0,
                       .micro_step_begin = kMicroSteps - 1,
                       .micro_step_end = end,
                       .empty = empty,
                       .payload = {&piece, empty ? size_t{0} : size_t{1}}})
          .status();
    };
    for (uint32_t m = 0; m < kMicroSteps; ++m) {
      if (!stream.EndMicroStep({1, 0}, m, {}).ok()) return "a micro-step is not taken";
    }
    std::string told = absl::StrCat(contribute(kMicroSteps + 1, false).message(), "\n",
                                    contribute(kMicroSteps, true).message(), "\n");
    const auto refusal = stream.Seal({1, 0}, kMicroSteps - 1, StepVote{}).value();
    absl::StrAppend(&told, refusal.has_value() ? refusal->status.message() : "it is sealed", "\n");
    if (!contribute(kMicroSteps, false).ok()) return "the same contribution is not taken";
    if (stream.Seal({1, 0}, kMicroSteps, StepVote{}).value().has_value()) return "not sealed";
    driver.listener(0).WaitForCommit(1);
    return absl::StrCat(told, job->StateHash());
  });
  Kept none;
  const Life twin = Live(none, {}, [&](Engine& engine) {
    JobDriver driver(engine, spec);
    driver.UploadWeights();
    driver.AttachAll();
    driver.Step(0, kMicroSteps);
    return driver.job().StateHash();
  });
  const std::vector<std::string> told = absl::StrSplit(life.result, '\n');
  ASSERT_EQ(told.size(), 4) << life.result;
  EXPECT_THAT(told[0], testing::HasSubstr("others were being added when the service's"));
  EXPECT_THAT(told[1], testing::HasSubstr("others were being added when the service's"));
  EXPECT_THAT(told[2], testing::HasSubstr("has not come again"));
  EXPECT_EQ(told[3], twin.result);
}

TEST_F(HalfAdded, HoldsNoLaneOnceItsStepIsAborted) {
  const JobSpec spec = OneChunkForEach(32);  // As many as there are lanes.
  Kept kept = DieInAllSums(spec);
  const Life life = Live(kept, {}, [&](Engine& engine) {
    alarm(60);  // A lane is waited for without a limit.
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    (void)job->AbortStep().value();
    JobDriver driver(job);
    driver.AttachAll();
    driver.Step(0, kMicroSteps);
    return absl::StrCat("step ", job->Status().committed_step);
  });
  EXPECT_EQ(life.result, "step 1") << life.last;
}

// Nobody but the directory knows anything of the process before.
TEST_F(JobDeathTest, WithAllThatIsNotInADirectoryIsNotSeen) {
  Training training = Small();
  training.micro_steps = 4;
  const std::set<std::string> kinds =
      DieAtEachStore(training, 0, /*stride=*/3, /*in_directory=*/true);
  EXPECT_THAT(kinds, testing::IsSupersetOf({"memory that is not kept yet", "a record's flip",
                                            "a ledger's word", "a turn of a sum"}));
  DieAtEachStore(training, /*second=*/3, /*stride=*/7, /*in_directory=*/true);
}

// What it had acknowledged, and decided, is not in the memory that is gone.
TEST_F(JobDeathTest, WithTheMemoryThatRanksShareIsNotSeen) {
  Training training = Small();
  training.in_place = true;
  DieAtEachStore(training, 0, /*stride=*/2, /*in_directory=*/true);
}

// In a process of its own, whose threads go with it.
TEST_F(JobDeathTest, IsNotWhatAJobCostsForWhichThereIsNoRoom) {
  const DirectoryInMemory directory;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto keeper = StateDirectory::Open({.path = directory.path()}).value();
    keeper->Settle();
    NamedMemory memory(*keeper, [] { return 100'000; });
    Engine engine(
        {.memory_limit_bytes = int64_t{256} << 20, .threads = 2, .named_memory = &memory});
    const std::string refusal(engine.CreateJob(Small().spec).status().message());
    if (write(ends[1], refusal.data(), refusal.size()) < 0) abort();
    _exit(0);
  }
  close(ends[1]);
  std::string refusal(512, '\0');
  refusal.resize(std::max<ssize_t>(0, read(ends[0], refusal.data(), refusal.size())));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(refusal,
              testing::ContainsRegex("^job [a-z]+ wants [0-9]+ bytes of memory, and .* has "
                                     "100000 left"));
  const std::filesystem::directory_iterator left(directory.path());
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);  // The superblock.
}

// Between two turns of the kernel, as the instant falls.
TEST_F(JobDeathTest, InTheMiddleOfAnUpdateIsNotSeen) {
  Training training = {.spec = MakeJobSpec({.group_sizes = {{300'000, 30'000}, {100'000}}}),
                       .steps = 4};
  training.spec.groups[1].hyper_parameters.amsgrad = true;
  const std::string expected = Undisturbed(training);
  int deaths = 0;
  constexpr int kLeastDeaths = 3;  // On a busy machine few looks fall into an update.
  for (int run = 0; run < 10 || (deaths < kLeastDeaths && run < 200); ++run) {
    Kept kept;
    Life life;
    for (int i = 0; i < 3; ++i) {
      life = Live(training, kept, {.looks = 1 + run % 10 + 5 * i});
      deaths += life.died ? 1 : 0;
      if (!life.died) break;
    }
    if (life.died) life = Live(training, kept, {});
    ASSERT_EQ(life.result, expected);
  }
  EXPECT_GE(deaths, kLeastDeaths);
}

}  // namespace
}  // namespace ballast
