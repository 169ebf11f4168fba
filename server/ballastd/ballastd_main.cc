// ballastd: the optimizer service as a process. SIGTERM, SIGINT and SIGHUP drain it; a second
// SIGTERM or SIGINT meanwhile ends it at once.
#include <pthread.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/topology.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/self_benchmark.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "server/ballastd/ballastd_flags.h"
#include "server/ballastd/drain.h"
#include "server/server.h"

namespace {

using ::ballast::server::BallastdFlags;

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "ballastd: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

// Sent by the thread that drains to the main thread, which waits for signals, at its end.
int DrainedSignal() { return SIGRTMIN; }

// Threads that are started from here on inherit the block, so only WaitForSignal gets the signals.
sigset_t BlockStopSignals() {
  // A closed pipe or terminal, or a limit on the size of files, makes a write fail; it does not end
  // the process and its state.
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, DrainedSignal());
  // A closed terminal ends a service that belongs to it, not one started with nohup.
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

int WaitForSignal(const sigset_t& signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) continue;
  return signal;
}

// A reader finds the whole file, or no file.
absl::Status WritePortFile(const std::string& path, const std::vector<std::string>& addresses) {
  return ballast::WriteAtomically(
      {{.path = path, .contents = absl::StrCat(absl::StrJoin(addresses, "\n"), "\n")}});
}

// Returns the exit code.
int PrintSelfBenchmark(const BallastdFlags& flags) {
  ballast::SelfBenchmarkOptions options{.threads = flags.threads};
  options.memory_bytes = std::min(options.memory_bytes, flags.memory_limit_bytes);
  const auto result = ballast::RunSelfBenchmark(options);
  if (!result.ok()) return Fail(result.status(), 1);
  std::fputs(ballast::ToTable(*result).c_str(), stdout);
  return 0;
}

// Null without --checkpoint-dir. What cannot be saved to is found now, not when it is needed.
absl::StatusOr<std::unique_ptr<ballast::CheckpointDirectory>> OpenCheckpoints(
    const BallastdFlags& flags) {
  if (flags.checkpoint_directory.empty()) return nullptr;
  auto opened =
      ballast::CheckpointDirectory::Open(ballast::PosixFileSystem(), flags.checkpoint_directory);
  if (opened.ok()) return opened;
  return ballast::Annotate(opened.status(), "flag --checkpoint-dir=" + flags.checkpoint_directory);
}

void LogCheckpoints(const ballast::CheckpointDirectory* checkpoints) {
  if (checkpoints == nullptr) {
    spdlog::warn("no --checkpoint-dir: all jobs are lost when the service is told to stop");
    return;
  }
  for (const ballast::CheckpointFacts& found : checkpoints->All()) {
    spdlog::info("found a checkpoint of {}; nothing loads it by itself: {}",
                 ballast::ToString(found), ballast::HowToResume(found.job));
  }
}

// A service whose host cannot be measured still starts.
void LogSelfBenchmark(const BallastdFlags& flags) {
  const auto result = ballast::RunSelfBenchmark(
      ballast::BriefSelfBenchmark(flags.threads, flags.memory_limit_bytes));
  if (!result.ok()) {
    spdlog::info("no self-benchmark: {}", std::string(result.status().message()));
    return;
  }
  spdlog::info("{}", ballast::ToLine(*result));
  for (const std::string& warning : ballast::HostWarnings(result->facts)) {
    spdlog::warn("{}", warning);
  }
}

// Returns the exit code; none if a job could not be saved: then the service goes on.
std::optional<int> DrainAndReport(ballast::Engine& engine, ballast::server::Server& server,
                                  const BallastdFlags& flags) {
  server.SetServing(false);
  const ballast::server::DrainReport report = ballast::server::DrainAndSave(
      engine, flags.drain_seconds,
      engine.checkpoints() == nullptr ? std::string() : engine.checkpoints()->path());
  for (const std::string& line : report.aborted) spdlog::warn("aborted {}", line);
  for (const std::string& line : report.saved) spdlog::info("saved {}", line);
  for (const std::string& line : report.lost) spdlog::error("lost {}", line);
  if (!report.failed.empty()) {
    for (const std::string& line : report.failed) spdlog::error("not saved {}", line);
    engine.EndDrain();
    server.SetServing(true);
    spdlog::error(
        "the service does not stop, because that would lose what could not be saved: mend the "
        "cause, or save elsewhere (ballast save), or give it up (ballast close), and send the "
        "signal again");
    return std::nullopt;
  }
  server.Shutdown(/*grace_seconds=*/1);
  return report.lost.empty() ? 0 : 1;
}

// As DrainAndReport. Meanwhile a second SIGTERM or SIGINT ends the process at once; SIGHUP does
// not, because a terminal that closes sends more than one.
std::optional<int> DrainUntilASecondSignal(const sigset_t& signals, ballast::Engine& engine,
                                           ballast::server::Server& server,
                                           const BallastdFlags& flags) {
  std::optional<int> exit_code;
  std::atomic<bool> drained = false;
  std::thread drain([&, waiting = pthread_self()] {
    exit_code = DrainAndReport(engine, server, flags);
    drained = true;
    pthread_kill(waiting, DrainedSignal());
  });
  while (!drained) {
    const int signal = WaitForSignal(signals);
    if (signal == SIGTERM || signal == SIGINT) _exit(128 + signal);
  }
  drain.join();
  return exit_code;
}

void LogDrain(int signal, const ballast::Engine& engine, const BallastdFlags& flags) {
  int64_t bytes = 0;
  const auto jobs = engine.ListJobs();
  for (const auto& job : jobs) bytes += job->Status().memory.state_bytes;
  const bool saves = !flags.checkpoint_directory.empty() && !jobs.empty();
  spdlog::info("signal {}: refusing new steps, at most {} s for those in progress{}", signal,
               flags.drain_seconds,
               saves ? absl::StrFormat("; then saving %d jobs, %.1f GiB, however long that takes",
                                       jobs.size(), static_cast<double>(bytes) / 0x1p30)
                     : std::string());
}

}  // namespace

int main(int argc, char** argv) {
  ballast::KeepHeapInOneArena();
  const absl::StatusOr<BallastdFlags> flags = ballast::server::ParseBallastdFlags(argc, argv);
  if (!flags.ok()) return Fail(flags.status(), 2);
  if (flags->self_benchmark) return PrintSelfBenchmark(*flags);
  spdlog::set_default_logger(spdlog::stderr_logger_mt("ballastd"));
  spdlog::set_level(spdlog::level::from_str(flags->log_level));
  const sigset_t signals = BlockStopSignals();

  const auto checkpoints = OpenCheckpoints(*flags);
  if (!checkpoints.ok()) return Fail(checkpoints.status(), 1);
  ballast::Engine engine({.memory_limit_bytes = flags->memory_limit_bytes,
                          .threads = flags->threads,
                          .warn = [](const std::string& line) { spdlog::warn("{}", line); },
                          .checkpoints = checkpoints->get()});
  auto server = ballast::server::Server::Start(engine, flags->server);
  if (!server.ok()) return Fail(server.status(), 1);
  LogCheckpoints(engine.checkpoints());
  if (flags->startup_benchmark) LogSelfBenchmark(*flags);
  if (!flags->port_file.empty()) {
    const absl::Status written = WritePortFile(flags->port_file, (*server)->addresses());
    if (!written.ok()) return Fail(written, 1);
  }
  spdlog::info("ballastd listening on {}, memory limit {:.1f} GiB, {} threads, kernel {}",
               absl::StrJoin((*server)->addresses(), ", "),
               static_cast<double>(flags->memory_limit_bytes) / 0x1p30,
               flags->threads > 0 ? flags->threads : ballast::MachineTopology().processors(),
               ballast::KernelTarget());

  std::optional<int> exit_code;
  while (!exit_code.has_value()) {
    const int signal = WaitForSignal(signals);
    if (signal == DrainedSignal()) continue;
    LogDrain(signal, engine, *flags);
    exit_code = DrainUntilASecondSignal(signals, engine, **server, *flags);
  }
  spdlog::shutdown();
  std::fflush(nullptr);
  // Every job is saved and every call has ended. Shutting gRPC's library down would sometimes wait
  // ten seconds for one of its pollers.
  _exit(*exit_code);
}
