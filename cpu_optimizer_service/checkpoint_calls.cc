#include "cpu_optimizer_service/checkpoint_calls.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/state/checkpoint.h"

namespace ballast {
namespace {

// Looks at checkpoints at once. Each has one of kDiskThreads for as long as its disk takes, or
// hangs. The others stay for loads, and for saves that hold back steps.
constexpr int kMostLooks = 4;
// What an index takes that is parsed and whose checksum is made anew, in its size.
constexpr int64_t kParsedTimes = 12;
// Of a few thousand parameters. It is read where the budget has no room, too.
constexpr int64_t kSmallIndexBytes = int64_t{1} << 20;

// One that waits for the disk, until it is answered.
class DiskCall {
 public:
  explicit DiskCall(Done<std::vector<FoundCheckpoint>> done) : done_(std::move(done)) {}
  bool answered() const { return answered_; }
  void Answer(absl::StatusOr<std::vector<FoundCheckpoint>> found) {
    // The disk thread and a Cancel may both come to this; the Done is called by the first.
    if (!answered_.exchange(true)) std::move(done_)(std::move(found));
  }

 private:
  std::atomic<bool> answered_ = false;
  Done<std::vector<FoundCheckpoint>> done_;
};

}  // namespace

Pending CheckpointCalls::Look(Engine::LookRequest request,
                              Done<std::vector<FoundCheckpoint>> done) {
  const auto progress =
      request.verified ? environment_.activities->Begin({.kind = ActivityKind::kVerifyingCheckpoint,
                                                         .job = request.job,
                                                         .directory = request.path})
                       : std::make_shared<Progress>();
  return OnDisk(
      [this, request = std::move(request),
       progress](const std::function<bool()>& wanted) -> FoundOrNot {
        BALLAST_ASSIGN_OR_RETURN(std::vector<FoundCheckpoint> found, LookNow(request));
        if (!request.verified) return found;
        if (found.size() > Engine::kMostVerified) {
          return absl::FailedPreconditionError(absl::StrCat(
              request.path, " has ", found.size(), " checkpoints, but one call verifies at most ",
              Engine::kMostVerified, "; verify them by step: ", request.path, "/step-STEP"));
        }
        const CountsIn here(*progress);
        return Verify(std::move(found), wanted);
      },
      std::move(done));
}

Pending CheckpointCalls::Delete(Engine::DeleteRequest request,
                                std::function<std::vector<std::shared_ptr<Job>>()> jobs,
                                Done<std::vector<FoundCheckpoint>> done) {
  return OnDisk([this, request = std::move(request), jobs = std::move(jobs)](
                    const std::function<bool()>&) { return DeleteNow(request, jobs()); },
                std::move(done));
}

CheckpointCalls::FoundOrNot CheckpointCalls::LookNow(const Engine::LookRequest& request) const {
  FileSystem& files = *environment_.file_system;
  if (!request.path.empty()) return FindCheckpoints(files, request.path);
  if (environment_.checkpoints == nullptr) {
    return absl::FailedPreconditionError(
        "the service has no --checkpoint-dir; start ballastd with one, or give an absolute path on "
        "its host");
  }
  std::vector<FoundCheckpoint> all;
  BALLAST_ASSIGN_OR_RETURN(std::vector<std::string> names,
                           files.List(environment_.checkpoints->path()));
  // from_folder relies on this order: the next call goes on where this one stops.
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (!IsJobName(name) || name < request.from_folder) continue;
    if (request.wanted != nullptr && !request.wanted(name)) continue;
    absl::StatusOr<std::vector<FoundCheckpoint>> found =
        ListCheckpoints(files, environment_.checkpoints->PathOf(name));
    if (!found.ok()) continue;  // A file, say, or one that is gone by now.
    all.insert(all.end(), found->begin(), found->end());
    if (all.size() >= request.enough) break;
  }
  return all;
}

CheckpointCalls::FoundOrNot CheckpointCalls::Verify(std::vector<FoundCheckpoint> found,
                                                    const std::function<bool()>& wanted) {
  FileSystem& files = *environment_.file_system;
  std::vector<FoundCheckpoint> verified;
  for (FoundCheckpoint& each : found) {
    if (!wanted()) return absl::CancelledError("the caller is gone");
    if (each.problem.ok()) {
      const std::string& directory = each.facts.directory;
      const CheckpointUses::Use use = environment_.checkpoint_uses->Read(directory);
      if (use == nullptr || !files.Exists(IndexPath(directory))) continue;
      each.problem = [&]() -> absl::Status {
        // No job says how large it may be; so only the memory for it does.
        const std::string path = IndexPath(directory);
        BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<ReadableFile> index, files.Open(path));
        MemoryBudget::Reservation room;
        if (index->size_bytes() > kSmallIndexBytes) {
          BALLAST_ASSIGN_OR_RETURN(room,
                                   environment_.budget->Reserve(kParsedTimes * index->size_bytes(),
                                                                absl::StrCat("reading ", path)));
        }
        return Checkpoint::Open(files, directory, kMostForeignIndexBytes).status();
      }();
    }
    verified.push_back(std::move(each));
  }
  return verified;
}

CheckpointCalls::FoundOrNot CheckpointCalls::DeleteNow(
    const Engine::DeleteRequest& request, absl::Span<const std::shared_ptr<Job>> jobs) {
  const std::filesystem::path path(request.path);
  const std::string folder = path.parent_path().string();
  const std::optional<uint64_t> step = StepNamed(path.filename().string());
  // Before the checkpoints are looked for: one whose save has ended since is found then.
  for (const std::shared_ptr<Job>& job : jobs) {
    if (!step.has_value() || (!request.uid.empty() && job->uid() != request.uid)) continue;
    for (const SaveProgress& save : job->Status().saves) {
      if (save.step != *step || save.directory != folder) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          request.path, " is in use: job ", job->spec().name,
          " is saving this step there; delete it when the save has ended (ballast job ",
          job->spec().name, " shows it)"));
    }
  }
  FoundOrNot deleted = ballast::DeleteCheckpoints(
      *environment_.file_system, *environment_.checkpoint_uses, request.path, request.uid);
  if (environment_.checkpoints != nullptr) {
    environment_.checkpoints->ForgetMissing(*environment_.file_system, folder);
  }
  if (!deleted.ok() || !environment_.tell) return deleted;
  for (const FoundCheckpoint& each : *deleted) {
    environment_.tell({.job = path.parent_path().filename().string(),
                       .text = absl::StrCat("deleted step ", each.facts.step, " in ",
                                            each.facts.directory, ", as a call asked")});
  }
  return deleted;
}

Pending CheckpointCalls::OnDisk(std::function<FoundOrNot(const std::function<bool()>& wanted)> work,
                                Done<std::vector<FoundCheckpoint>> done) {
  // The threads are for saves first of all.
  // Counted first and compared then, so that two calls cannot both take the last place.
  if (looks_.fetch_add(1) >= kMostLooks) {
    --looks_;
    std::move(done)(absl::ResourceExhaustedError(
        absl::StrCat(kMostLooks,
                     " calls list, verify or delete checkpoints already; try again "
                     "when one has ended")));
    return {};
  }
  const auto call = std::make_shared<DiskCall>(std::move(done));
  environment_.disk_threads->Run([this, work = std::move(work), call] {
    FoundOrNot found = call->answered() ? absl::CancelledError("the caller is gone")
                                        : work([&] { return !call->answered(); });
    // Here, and not where the call is cancelled: until now it has had a thread.
    --looks_;
    call->Answer(std::move(found));
  });
  return Pending([call] { call->Answer(absl::CancelledError("the caller is gone")); });
}

}  // namespace ballast
