// Processes of the service that die, and others that take over their memory.
//
// Each process is forked from the test's, which has no threads, keeps the memory, and hands it on.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_DEATH_DYING_JOBS_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_DEATH_DYING_JOBS_H_

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
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
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/address_limit.h"
#include "tests/support/sanitizers.h"

namespace ballast {

// What processes leave: with this one; or, where a directory is named, there and nowhere else.
struct Kept : std::map<std::string, FileDescriptor> {
  std::string directory;
  int64_t room_bytes = -1;  // For the next process to take over what is left; below 0: enough.
  // Where processes save by themselves; empty: they do not.
  std::string checkpoint_directory;
  CheckpointPolicy policy;
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
    files_[name] = dup(descriptor);
    return absl::OkStatus();
  }
  void Drop(const std::string& name) override { Send(name, -1); }
  std::map<std::string, FileDescriptor> TakeKept() override {
    std::map<std::string, FileDescriptor> taken;
    for (const auto& [name, file] : kept_) {
      taken.emplace(name, FileDescriptor(dup(file.number())));
      files_[name] = file.number();
    }
    return taken;
  }
  // The kept file whose name ends so; -1: none.
  int FileOf(const std::string& name_end) const {
    for (const auto& [name, file] : files_) {
      if (absl::EndsWith(name, name_end)) return file;
    }
    return -1;
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
  std::map<std::string, int> files_;  // By name.
};

inline void Receive(int socket, Kept& kept) {
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
  bool in_place = false;  // Ranks share memory with the first process, which is not kept.
  bool pins = false;      // A reader holds the state that each process begins with.
  uint64_t undoes = 0;    // This step, once it is committed for the first time. 0: none.
  uint64_t writes = 0;    // Of state, once this step is committed. 0: none.
  uint64_t derives = 0;   // Once this step is committed, to `derived`. 0: never.
  JobSpec derived;
  uint64_t skips = 0;     // This step is voted to be abandoned. 0: none.
  uint64_t begins = 0;    // At this step, with moments.
  uint64_t loads = 0;     // Once this step is committed for the first time. 0: never.
  std::string saved;      // What is loaded then: a folder, in which step 1 is saved.
  uint64_t aborts = 0;    // This step, once all ranks have begun it for the first time. 0: none.
  uint64_t replaces = 0;  // A new process takes the last rank then, instead. 0: none does.
};

inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "the worker was told: %s\n", status.ToString().c_str());
  _exit(3);
}

// What a worker's session does: it goes on where the service stands, as the answer to its stream's
// opening says.
class Worker {
 public:
  Worker(Engine& engine, const Training& training) : engine_(engine), training_(training) {
    const absl::StatusOr<std::shared_ptr<Job>> found = engine.FindJob(training.spec.name);
    job_ = found.ok() ? *found : engine.CreateJob(training.spec).value();
    driver_.emplace(job_);
  }

  // The state's hash and what is told of the steps, at the end.
  std::string Train() {
    // Only what has not come yet would be missing; the job tells no one, so all is sent again.
    if (training_.begins > 0) UploadState();
    for (int chunk = 0; chunk < static_cast<int>(job_->layout().chunks().size()); ++chunk) {
      if (job_->Status().phase != JobPhase::kAwaitingWeights) break;
      const std::vector<float> weights = driver_->Values(chunk, 1);
      const auto* bytes = reinterpret_cast<const std::byte*>(weights.data());
      const absl::Span<const std::byte> piece(bytes, weights.size() * sizeof(float));
      (void)job_->WriteInitialWeights(chunk, {&piece, 1}).value();
    }
    AwaitLoad();
    OpenAll();
    DoWhatIsDue();
    std::vector<int> parameters(job_->spec().layout.parameters.size());
    std::iota(parameters.begin(), parameters.end(), 0);
    std::optional<Snapshot> held;
    if (training_.pins) held = job_->TakeSnapshot(parameters).value();
    while (job_->Status().committed_step < training_.steps) {
      Step();
      DoWhatIsDue();
    }
    const JobStatus status = job_->Status();
    std::string text = absl::StrCat(
        job_->StateHash(), " applied ", status.applied_steps, " skipped ", status.skipped_steps,
        " whole ", status.coverage_complete_steps, " generation ", ToString(status.generation));
    for (const StepRecord& record : status.recent_steps) {
      absl::StrAppend(&text, " ", record.outcome.step, ":", record.outcome.decision.norm);
    }
    absl::StrAppend(&text, " history");
    for (const HistoryEntry& entry : job_->History({}).entries) {
      absl::StrAppend(&text, " ", entry.first_step, ":", entry.cells[0].mean);
    }
    return text;
  }

 private:
  void UploadState() {
    const std::vector<int64_t> counts(job_->spec().layout.parameters.size(), training_.begins);
    for (int rank = 0; rank < job_->layout().world_size(); ++rank) {
      Open(rank);
      Must(driver_->UploadState({.step = training_.begins, .update_counts = counts}, rank));
    }
  }
  void DoWhatIsDue() {
    WriteIfDue();
    UndoIfDue();
    LoadIfDue();
    DeriveIfDue();
  }
  void DeriveIfDue() {
    if (training_.derives == 0 || job_->Status().committed_step != training_.derives) return;
    if (!job_->derivation().is_from_nothing()) return;
    JobDriver derived(
        engine_.CreateJob(training_.derived, {.uid = job_->uid(), .checkpoint = ""}).value());
    derived.UploadWeights(5);
    driver_.reset();
    job_ = engine_.FindJob(training_.spec.name).value();
    if (job_.get() != &derived.job()) Must(absl::InternalError("the derived job is not the job"));
    driver_.emplace(job_);
    shares_memory_.clear();
    OpenAll();
  }
  // Asks in each process again, and from step to step: nothing says whether an answer was lost.
  void UndoIfDue() {
    const JobStatus status = job_->Status();
    const bool was_undone = status.generation != Generation(1);
    if (training_.undoes == 0 || (!was_undone && status.committed_step != training_.undoes)) return;
    Must(job_->UndoStep({.step = training_.undoes, .generation = 1}).status());
    if (was_undone) return;
    for (int rank = 0; rank < job_->layout().world_size(); ++rank) Open(rank);
  }
  // In each process again: nothing says whether an answer was lost.
  void WriteIfDue() {
    if (training_.writes == 0 || job_->Status().committed_step != training_.writes) return;
    StateWrite write = driver_->NextWrite({Plane::kMaster, Plane::kExpAvgSq}, {0, 2}, {0, 1});
    write.number = 1;
    driver_->WriteState(write, 50);
  }
  // Saves step 1, too, where that has not been done.
  void LoadIfDue() {
    const JobStatus status = job_->Status();
    if (training_.loads == 0 || status.generation != Generation(1)) return;
    if (status.committed_step == 1 && !std::filesystem::exists(training_.saved)) {
      Must(job_->Save(training_.saved).status());
    }
    if (status.committed_step != training_.loads) return;
    Must(job_->Load(training_.saved).status());
    OpenAll();
  }
  // That another process has begun, and this one does again.
  void AwaitLoad() { (void)job_->TakeSnapshot({}); }
  // What is given up once: the step in which that is due, but not its second attempt.
  bool IsGivenUpNow(uint64_t step) const {
    return (step == training_.aborts || step == training_.replaces) &&
           job_->Status().generation == Generation(1);
  }
  void GiveUp() {
    if (training_.aborts > 0) {
      Must(job_->AbortStep().status());
    } else {
      const int last = job_->layout().world_size() - 1;
      driver_->Attach(last, ProcessOf(last, /*replaced=*/true));
    }
    if (job_->Status().generation != Generation(1)) OpenAll();
  }
  std::string ProcessOf(int rank, bool replaced) const {
    return absl::StrCat(replaced ? "another" : "process", rank);
  }
  std::string ProcessOf(int rank) const {
    const JobStatus status = job_->Status();
    const bool was_replaced =
        training_.replaces > 0 &&
        (status.generation != Generation(1) || status.committed_step >= training_.replaces);
    return ProcessOf(rank, was_replaced && rank + 1 == job_->layout().world_size());
  }
  void OpenAll() {
    for (int rank = 0; rank < job_->layout().world_size(); ++rank) Open(rank);
  }
  void Open(int rank) {
    const Generation generation = job_->Status().generation;
    const std::string process = ProcessOf(rank);
    driver_->Attach(rank, process, job_->spec().update_mode, nullptr, generation);
    // Refused to a rank that has begun: its gradients then come in messages.
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
    if (IsGivenUpNow(step)) return GiveUp();
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
  Engine& engine_;
  const Training training_;
  std::shared_ptr<Job> job_;
  std::optional<JobDriver> driver_;
  std::set<int> shares_memory_;  // Ranks.
};

struct Death {
  uint64_t at_store = 0;  // The number of the store; 0: not at a store.
  // If not empty, only stores of this kind count, and a thread that has done one before the last
  // stops there: so all of them are under way.
  std::string kind;
  // From the store on, no thread can write to this page of the kept memory named in `memory`: the
  // process dies of the first write, whichever thread makes it. -1: it dies at the store itself.
  int64_t at_page = -1;
  std::string memory;
};

// Lets the process die of its next write to the page. False: no such page is mapped.
inline bool ForbidWrites(int file, int64_t page) {
  struct stat facts = {};
  const int64_t page_bytes = getpagesize();
  if (fstat(file, &facts) != 0 || page >= facts.st_size / page_bytes) return false;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long inode = 0;
    if (!absl::StrContains(line, "/memfd:")) continue;
    if (std::sscanf(line.c_str(), "%lx-%*x %*s %*x %*s %lu", &begin, &inode) != 2) abort();
    if (inode != facts.st_ino) continue;
    signal(SIGSEGV, SIG_DFL);  // A sanitizer has a handler of its own.
    const rlimit no_core = {.rlim_cur = 0, .rlim_max = 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (mprotect(reinterpret_cast<void*>(begin + page * page_bytes), page_bytes, PROT_READ) != 0) {
      abort();
    }
    return true;
  }
  return false;
}

// What became of a process.
struct Life {
  bool died = false;
  std::string result;  // What one that did not die has returned.
  std::string last;    // The store at which it died.
};

// The lines about the jobs that a process has taken over; in that process.
inline std::vector<std::string> told_at_the_start;

inline Life Live(Kept& kept, const Death& death,
                 const std::function<std::string(Engine&)>& what_it_does) {
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
    std::unique_ptr<CheckpointDirectory> checkpoints;
    if (!kept.checkpoint_directory.empty()) {
      checkpoints =
          CheckpointDirectory::Open(PosixFileSystem(), kept.checkpoint_directory, kept.policy)
              .value();
    }
    Engine engine({.memory_limit_bytes = int64_t{256} << 20,
                   .threads = 2,
                   .named_memory = &memory,
                   .checkpoints = checkpoints.get()});
    std::atomic<uint64_t> stores = 0;
    std::function<void(const char*)> seam = [&](const char* what) {
      if (!death.kind.empty() && death.kind != what) return;
      const bool is_it = ++stores == death.at_store;
      if (death.at_page >= 0) {
        if (is_it && !ForbidWrites(socket_keeper.FileOf(death.memory), death.at_page)) abort();
        return;
      }
      if (!is_it) {
        while (!death.kind.empty()) pause();
        return;
      }
      if (write(pipe_ends[1], what, std::strlen(what)) < 0) abort();
      kill(getpid(), SIGKILL);
    };
    if (death.at_store > 0) store_seam = &seam;
    std::optional<ScopedAddressLimit> limit;
    if (kept.room_bytes >= 0) limit.emplace(kept.room_bytes);
    const Engine::TakenOver taken = engine.TakeOverJobs();
    limit.reset();
    told_at_the_start = taken.back;
    const bool is_whole = taken.left.empty() && taken.lost.empty();
    if (directory && is_whole) directory->Settle();
    const std::string result = is_whole             ? what_it_does(engine)
                               : taken.lost.empty() ? absl::StrCat("left: ", taken.left.front())
                                                    : absl::StrCat("lost: ", taken.lost.front());
    if (write(pipe_ends[1], result.data(), result.size()) < 0) abort();
    _exit(0);
  }
  close(ends[1]);
  close(pipe_ends[1]);
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

inline Life Live(const Training& training, Kept& kept, const Death& death) {
  return Live(kept, death, [&](Engine& engine) { return Worker(engine, training).Train(); });
}

inline std::string Undisturbed(const Training& training) {
  Kept kept;
  return Live(training, kept, {}).result;
}

// What lies in a directory: contents by name.
using Files = std::map<std::string, std::string>;

inline Files ReadAll(const std::string& directory) {
  Files files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    // What the process was making when it died is nothing yet, and is removed in any case.
    if (entry.path().extension() == ".new") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().filename()] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  // Which process has it is written there.
  files.erase("superblock");
  return files;
}

// "4f6c....second_versions.4096" is "second_versions", "4f6c....versions_12.4096" is "versions".
inline std::string KindOf(const std::string& file) {
  const std::string label = std::vector<std::string>(absl::StrSplit(file, '.'))[1];
  return label.substr(0, label.find_first_of("0123456789") - 1);
}

class JobDeathTest : public testing::Test {
 protected:
  // Dies at each store in turn; and, of the process that takes over, at its `second` store. Returns
  // the kinds of stores at which one died.
  std::set<std::string> DieAtEachStore(const Training& training, uint64_t second = 0,
                                       uint64_t stride = 1, bool in_directory = false) {
    const std::string expected = Undisturbed(training);
    std::set<std::string> kinds;
    // All stores are for the bits, which sanitizers do not change; for memory errors some are enough.
    if (kSanitized) stride = 12 * stride + 1;
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

  // Among the kinds of stores at which one died were these. Sanitizers leave most stores out.
  static void ExpectAmong(const std::set<std::string>& seen,
                          const std::vector<std::string>& kinds) {
    if (!kSanitized) EXPECT_THAT(seen, testing::IsSupersetOf(kinds));
  }

  Training Small() const {
    return {.spec = MakeJobSpec({.group_sizes = {{700, 24}, {600}},
                                 .world_size = 2,
                                 .bucket_elements = 1024,
                                 .chunk_elements = 512}),
            .steps = 2};
  }
  // Of packed state, and of some that is too small for it.
  Training Packed(StateFormat format) const {
    Training training = Small();
    JobSpec& spec = training.spec;
    spec.layout.parameters[0].shape = {64, 65};
    spec.layout.states = {{.format = format}, {}};
    spec.groups[0].hyper_parameters.beta2 = 0.97;
    EXPECT_TRUE(CutInBuckets(2048, spec.layout).ok());
    return training;
  }
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_DEATH_DYING_JOBS_H_
