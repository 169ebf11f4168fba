#include "server/ballastd/state_check.h"

#include <cstdio>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "cpu_optimizer_service/job/core/job_record.h"
#include "cpu_optimizer_service/job/kept/kept_job.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "server/holder/held_files.h"
#include "server/holder/upgrade.h"
#include "server/server.h"
#include "server/status/http_server.h"

namespace ballast::server {
namespace {

// Trying the program is bounded (holder/trial.h); to map and to roll forward what it takes over may
// take it a while.
constexpr double kLongestUpgradeSeconds = 300;

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "ballastd: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

absl::StatusOr<pid_t> ParseProcess(const char* flag, const std::string& text) {
  pid_t process = 0;
  if (absl::SimpleAtoi(text, &process) && process > 0) return process;
  return absl::InvalidArgumentError(absl::StrCat(
      "flag --", flag, ": '", text, "' is no process id; give that of the service's parent"));
}

absl::Status CheckFormat(const std::string& whose, uint32_t format) {
  if (format == kKeptFormat) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      whose, " keeps its jobs in format ", format, ", and this ballastd reads format ", kKeptFormat,
      ": stop the service, which saves its jobs, start this one, and load them"));
}

}  // namespace

int UpgradeService(const BallastdFlags& flags) {
  const absl::StatusOr<pid_t> process = ParseProcess("upgrade", flags.upgrade);
  if (!process.ok()) return Fail(process.status(), 2);
  const absl::StatusOr<std::string> done = Upgrade(*process, kLongestUpgradeSeconds);
  if (!done.ok()) return Fail(done.status(), 1);
  std::printf("ballastd: %s\n", done->c_str());
  return 0;
}

int CheckState(const BallastdFlags& flags) {
  const absl::StatusOr<pid_t> process = ParseProcess("check-state", flags.check_state);
  if (!process.ok()) return Fail(process.status(), 2);
  const absl::StatusOr<uint32_t> format = StateFormatOf(*process);
  if (!format.ok()) return Fail(format.status(), 2);
  const std::string whose = absl::StrCat("process ", *process);
  if (const absl::Status status = CheckFormat(whose, *format); !status.ok()) return Fail(status, 2);
  std::printf("ballastd: %s keeps its jobs in format %u, which this ballastd reads\n",
              whose.c_str(), *format);
  return 0;
}

int CheckHeldState(const BallastdFlags& flags) {
  const auto held = HeldFiles::OfHolder();
  if (!held.ok()) return Fail(held.status(), 2);
  if (*held == nullptr) {
    return Fail(absl::InvalidArgumentError("flag --check-state: give a process id, the parent's"),
                2);
  }
  if (const absl::Status status = CheckFormat("the service", (*held)->state_format());
      !status.ok()) {
    return Fail(status, 2);
  }
  // Of this process's own copies of the descriptors: what is taken or closed here stays with the
  // holder and with the service.
  NamedMemory memory(**held);
  const FileDescriptor lock = memory.TakeFile(StateDirectory::kLockName);
  // The names of a job's memory begin with its uid and a slash (named_memory.h).
  const bool holds_jobs = absl::c_any_of(
      memory.Left(), [](const std::string& name) { return name.find('/') == kJobUidCharacters; });
  const absl::Status same = StateDirectory::CheckSame(lock, holds_jobs, flags.state_directory);
  if (!same.ok()) return Fail(Annotate(same, "flag --state-dir"), 1);
  if (!flags.checkpoint_directory.empty()) {
    const absl::Status savable =
        CheckpointDirectory::Open(PosixFileSystem(), flags.checkpoint_directory,
                                  flags.checkpoint_policy)
            .status();
    // A full disk was there before, and makes no flag wrong.
    if (!savable.ok() && !absl::IsResourceExhausted(savable)) {
      return Fail(Annotate(savable, "flag --checkpoint-dir=" + flags.checkpoint_directory), 1);
    }
  }
  std::vector<Address> others;
  // It has a value: ParseBallastdFlags has parsed it, too.
  if (!flags.status.listen.empty()) others = {HttpServer::ParseListen(flags.status).value()};
  const absl::Status addresses = Server::CheckNewAddresses(flags.server, others, memory);
  if (!addresses.ok()) return Fail(addresses, 1);
  // Last, and beside the exit code: another program could end with 0, too, and has looked at
  // nothing.
  (*held)->CanTakeOver();
  return 0;
}

}  // namespace ballast::server
