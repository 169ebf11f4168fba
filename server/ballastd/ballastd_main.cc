// ballastd: the optimizer service as a process. SIGTERM and SIGINT drain it; a second one ends it
// at once.
#include <pthread.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/topology.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/self_benchmark.h"
#include "server/ballastd/ballastd_flags.h"
#include "server/ballastd/drain.h"
#include "server/server.h"

namespace {

using ::ballast::server::BallastdFlags;

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "ballastd: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

// Threads that are started from here on inherit the block, so only WaitForSignal gets the signals.
sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
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

// Returns the exit code.
int DrainAndReport(ballast::Engine& engine, ballast::server::Server& server,
                   const BallastdFlags& flags) {
  server.SetNotServing();
  const ballast::server::DrainReport report =
      ballast::server::DrainAndSave(engine, flags.drain_seconds, flags.checkpoint_directory);
  for (const std::string& line : report.aborted) spdlog::warn("aborted {}", line);
  for (const std::string& line : report.saved) spdlog::info("saved {}", line);
  for (const std::string& line : report.lost) spdlog::error("lost {}", line);
  server.Shutdown(/*grace_seconds=*/1);
  return report.lost.empty() ? 0 : 1;
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

  ballast::Engine engine({.memory_limit_bytes = flags->memory_limit_bytes,
                          .threads = flags->threads,
                          .warn = [](const std::string& line) { spdlog::warn("{}", line); }});
  auto server = ballast::server::Server::Start(engine, flags->server);
  if (!server.ok()) return Fail(server.status(), 1);
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

  const int signal = WaitForSignal(signals);
  spdlog::info("signal {}: refusing new steps, at most {} s for those in progress", signal,
               flags->drain_seconds);
  std::thread([signals] { _exit(128 + WaitForSignal(signals)); }).detach();
  const int exit_code = DrainAndReport(engine, **server, *flags);
  spdlog::shutdown();
  std::fflush(nullptr);
  // Every job is saved and every call has ended. Shutting gRPC's library down would sometimes wait
  // ten seconds for one of its pollers.
  _exit(exit_code);
}
