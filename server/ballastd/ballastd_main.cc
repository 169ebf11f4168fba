// ballastd: the optimizer service as a process, and its parent, which holds its memory. SIGTERM,
// SIGINT and a terminal's SIGHUP drain it; stop_signals.h says what more of them mean meanwhile.
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "cpu_optimizer_service/job/kept/kept_job.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/self_benchmark.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "proto/cluster/cluster.h"
#include "server/ballastd/ballastd_flags.h"
#include "server/ballastd/drain.h"
#include "server/ballastd/life_log.h"
#include "server/ballastd/service_log.h"
#include "server/ballastd/service_manager.h"
#include "server/ballastd/start_check.h"
#include "server/ballastd/state_check.h"
#include "server/ballastd/status_page.h"
#include "server/ballastd/stop_signals.h"
#include "server/ballastd/unused_jobs.h"
#include "server/call_pool.h"
#include "server/holder/held_files.h"
#include "server/holder/holder.h"
#include "server/holder/holder_table.h"
#include "server/holder/log_line.h"
#include "server/server.h"
#include "server/status/diagnostics_service.h"

namespace {

using ::ballast::server::BallastdFlags;

int Fail(const absl::Status& status, int exit_code) {
  ballast::server::LogLine(ballast::server::kErrorPriority, "%s",
                           std::string(status.message()).c_str());
  return exit_code;
}

// Once there are jobs. Nothing is destroyed: that would close them.
[[noreturn]] void FailWithJobs(const absl::Status& status, int exit_code) {
  Fail(status, exit_code);
  spdlog::default_logger()->flush();
  std::fflush(nullptr);
  _exit(exit_code);
}

const std::terminate_handler usual_end = std::get_terminate();

// From then on an end is a death, over which the holder starts another process.
std::atomic<bool> serves = false;

// Where the system has no memory or thread for this process, the usual words do not say what to do.
[[noreturn]] void EndWithout(const char* what) {
  std::set_new_handler(nullptr);  // What the line needs must not lead here again.
  ballast::server::LogLine(
      ballast::server::kErrorPriority,
      "the system gives it no more (%s); see its limits (ulimit -u, ulimit -v, TasksMax, the "
      "control group)",
      what);
  // To start again would need as much.
  if (!serves) _exit(1);
  std::abort();
}

[[noreturn]] void EndWithoutResources() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc& error) {
    EndWithout(error.what());
  } catch (const std::system_error& error) {
    EndWithout(error.what());
  } catch (...) {
  }
  // Any other exception is a bug, and ends the process in the usual way.
  usual_end();
  std::abort();
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
  sigaddset(&signals, ballast::server::FarewellSignal());
  // A closed terminal ends a service that belongs to it, not one started with nohup.
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

// Who signals all processes of a name or of a group means the service once, and its parent passes
// that on.
bool IsForThisProcess(const siginfo_t& info, ballast::server::HeldFiles* held) {
  if (held == nullptr || info.si_signo == DrainedSignal()) return true;
  if (info.si_signo == ballast::server::FarewellSignal()) return info.si_pid == getppid();
  if (held->TakeStop()) return true;
  spdlog::info("signal {} of process {} is left to the parent, process {}", info.si_signo,
               info.si_pid, getppid());
  return false;
}

void TellWork(const ballast::Engine& engine, ballast::server::ServiceManager& manager) {
  std::vector<std::string> lines;
  for (const ballast::Activity& activity : engine.ListActivities()) {
    lines.push_back(ballast::server::LineOf(activity.job, ballast::ToLine(activity)));
  }
  if (!lines.empty()) manager.Saving(absl::StrJoin(lines, ", "));
}

// Of the holder, which replaces this process now. What does not end in time breaks.
void SayFarewell(ballast::Engine& engine, ballast::server::Server& server,
                 ballast::server::HeldFiles& held) {
  constexpr double kMostSeconds = 0.3;
  spdlog::info("another process takes this one's place, and goes on with its jobs");
  engine.SayFarewell();
  server.LeaveAddresses();
  // Returns when clients have read the end of their streams: gRPC closes a connection once a ping
  // behind that is answered. If the process ended earlier, with messages unread, the kernel would
  // reset the connection, and the client could lose the end.
  server.Shutdown(kMostSeconds);
  held.SaidFarewell();
}

// Meanwhile the service manager is kept informed that the engine is not stuck. `held`: null without
// a holder, also where there is a directory of state: then nobody passes signals on.
int WaitForSignal(const sigset_t& signals, const ballast::Engine& engine,
                  ballast::server::HeldFiles* held, ballast::server::ServiceManager& manager,
                  ballast::server::StatusPage& status_page) {
  const timespec interval = absl::ToTimespec(manager.keep_alive_interval());
  while (true) {
    siginfo_t info = {};
    const int signal = sigtimedwait(&signals, &info, &interval);
    if (signal > 0 && IsForThisProcess(info, held)) return signal;
    // EAGAIN: the interval is over.
    if (signal > 0 || errno != EAGAIN) continue;
    engine.ListJobs();  // Takes the lock that everything else takes.
    manager.KeepAlive();
    if (manager.is_saving()) TellWork(engine, manager);
    status_page.KeepTrying(absl::Now());
  }
}

// A reader finds the whole file, or no file.
absl::Status WritePortFile(const std::string& path, const std::vector<std::string>& addresses) {
  return ballast::WriteAtomically(
      {{.path = path, .contents = absl::StrCat(absl::StrJoin(addresses, "\n"), "\n")}});
}

// Returns the exit code.
int PrintSelfBenchmark(const BallastdFlags& flags) {
  // Enough for several rounds of all updates.
  ballast::SelfBenchmarkOptions options{.threads = flags.threads, .seconds = 12};
  options.memory_bytes = std::min(options.memory_bytes, flags.memory_limit_bytes);
  options.updates.clear();
  for (const ballast::StateFormat format : ballast::kStateFormats) {
    options.updates.push_back({.values = ballast::HyperParameters(), .format = format});
  }
  for (const ballast::RuleRow& row : ballast::Rules()) {
    if (row.defaults.rule != ballast::Rule::kAdam)
      options.updates.push_back({.values = row.defaults});
  }
  options.updates.push_back({.values = ballast::DefaultsOf(ballast::Rule::kSgd)});
  options.updates.back().values.momentum = 0.9;
  const auto result = ballast::RunSelfBenchmark(options);
  if (!result.ok()) return Fail(result.status(), 1);
  std::fputs(ballast::ToTable(*result).c_str(), stdout);
  return 0;
}

// Null without --checkpoint-dir. `problem`: why no job could be saved there now.
absl::StatusOr<std::unique_ptr<ballast::CheckpointDirectory>> OpenCheckpoints(
    const BallastdFlags& flags, absl::Status& problem) {
  if (flags.checkpoint_directory.empty()) return nullptr;
  return ballast::CheckpointDirectory::Open(ballast::PosixFileSystem(), flags.checkpoint_directory,
                                            flags.checkpoint_policy, &problem);
}

// What cannot be saved to is found now, not when it is needed. Where there are jobs already, that
// is no reason to lose them: they go on.
absl::Status CheckCheckpoints(const absl::Status& problem, bool has_jobs,
                              const BallastdFlags& flags) {
  if (problem.ok()) return absl::OkStatus();
  if (!has_jobs) {
    return ballast::Annotate(problem, "flag --checkpoint-dir=" + flags.checkpoint_directory);
  }
  spdlog::error("--checkpoint-dir: {}; jobs go on unsaved until that is mended",
                std::string(problem.message()));
  return absl::OkStatus();
}

void LogCheckpoints(const ballast::CheckpointDirectory* checkpoints, const BallastdFlags& flags) {
  if (checkpoints == nullptr) {
    spdlog::warn("no --checkpoint-dir: all jobs are lost {}", flags.state_directory.empty()
                                                                  ? "when the service stops"
                                                                  : "with this host's memory");
    return;
  }
  if (!checkpoints->policy().saves()) {
    spdlog::warn(
        "no --checkpoint-every: jobs are saved only when the service stops, and on request "
        "(ballast "
        "save); if its host dies before, the steps since then are lost");
  }
  for (const ballast::CheckpointFacts& found : checkpoints->All()) {
    spdlog::info("found a checkpoint of {}; nothing loads it by itself: {}",
                 ballast::ToString(found), ballast::HowToResume(found.job));
  }
}

// Null without --state-dir.
absl::StatusOr<std::unique_ptr<ballast::StateDirectory>> OpenStateDirectory(
    const BallastdFlags& flags, ballast::FileKeeper* held,
    const ballast::CheckpointDirectory* checkpoints) {
  if (flags.state_directory.empty()) return nullptr;
  auto opened = ballast::StateDirectory::Open(
      {.path = flags.state_directory,
       .others = held,
       .say = [](const std::string& line) { spdlog::warn("--state-dir: {}", line); },
       .last_checkpoint =
           [checkpoints](const std::string& uid) {
             return checkpoints == nullptr ? std::string() : checkpoints->LastOf(uid);
           }});
  if (opened.ok()) return opened;
  return ballast::Annotate(opened.status(), "flag --state-dir");
}

// What an earlier process of the service left.
ballast::server::ServiceHistory TakeOverJobs(ballast::Engine& engine,
                                             const ballast::server::HeldFiles* held,
                                             ballast::StateDirectory* directory) {
  const absl::Time begin = absl::Now();
  const ballast::Engine::TakenOver taken = engine.TakeOverJobs();
  const bool is_upgrade = held != nullptr && held->is_upgrade();
  const char* const when = is_upgrade ? "after an upgrade" : "after a death";
  const auto level = is_upgrade ? spdlog::level::info : spdlog::level::warn;
  for (const std::string& line : taken.back) spdlog::log(level, "{}: {}", when, line);
  if (!taken.left.empty()) {
    // The next attempt is the holder's, or the next start's.
    FailWithJobs(absl::ResourceExhaustedError(absl::StrCat(
                     when, ": ", taken.left.front(),
                     "; its memory is left as it is: make room, and it is tried again")),
                 1);
  }
  if (directory != nullptr && !taken.lost.empty()) {
    // Its memory stays as it is: an operator may know better.
    FailWithJobs(absl::DataLossError(absl::StrCat(
                     "flag --state-dir: ", directory->description(), ": ", taken.lost.front(),
                     "; to start without that job, remove the files that begin with its uid")),
                 1);
  }
  for (const std::string& line : taken.lost) spdlog::error("{}: {}", when, line);
  // Not earlier: until now a file that was given up is still there, so the ends above lose nothing.
  if (directory != nullptr) directory->Settle();
  const bool any = !taken.back.empty() || !taken.lost.empty();
  return {.deaths = held == nullptr ? 0 : held->deaths(),
          .recovery_seconds = any ? absl::ToDoubleSeconds(absl::Now() - begin) : 0};
}

void LogWhatOutlives(ballast::NamedMemory* memory, const ballast::StateDirectory* directory) {
  if (memory == nullptr) {
    spdlog::info("jobs die with this process (--holder=none)");
  } else if (directory != nullptr) {
    spdlog::info("what jobs are and have been given outlives all processes: it lies in {}, in {}",
                 directory->description(), memory->PagesForPeople());
  } else {
    spdlog::info(
        "what jobs are and have been given outlives this process: its parent holds it, in {}",
        memory->PagesForPeople());
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

// A new service that cannot be found there is of no use; one with jobs goes on without it.
absl::Status CheckCluster(const ballast::server::ServerOptions& options) {
  if (options.cluster.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const auto address, ballast::cluster::ParseAddress(options.cluster));
  BALLAST_ASSIGN_OR_RETURN(const auto cluster,
                           ballast::cluster::Cluster::Open(address, options.etcd));
  return ballast::Annotate(cluster->Check(), "flag --cluster");
}

// When it stops, it leaves jobs as they are: the next process goes on with them.
bool LeavesJobs(const BallastdFlags& flags) {
  return !flags.state_directory.empty() && flags.checkpoint_directory.empty();
}

// Returns the exit code; none if a job could not be saved, for the reason `why_not`: then the service
// goes on.
std::optional<int> DrainAndReport(ballast::Engine& engine, ballast::server::Server& server,
                                  const BallastdFlags& flags, ballast::server::HeldFiles* held,
                                  std::string& why_not) {
  // First, so that probes say so for as long as it drains.
  server.SetServing(false);
  if (LeavesJobs(flags)) {
    engine.SayFarewell();
    server.Shutdown(/*grace_seconds=*/1);
    return 0;
  }
  const ballast::server::DrainReport report = ballast::server::DrainAndSave(
      engine, flags.drain_seconds,
      engine.checkpoints() == nullptr ? std::string() : engine.checkpoints()->path());
  for (const std::string& line : report.aborted) spdlog::warn("aborted {}", line);
  for (const std::string& line : report.lost) spdlog::error("lost {}", line);
  if (!report.failed.empty()) {
    for (const std::string& line : report.failed) spdlog::error("not saved {}", line);
    // Steps are taken again before probes are told that they are.
    engine.EndDrain();
    server.SetServing(true);
    // Otherwise the holder would take this process's next end for the stop that was asked for, or
    // send the signal again to the process after it.
    if (held != nullptr) held->StopRefused();
    why_not = report.failed.front();
    return std::nullopt;
  }
  server.Shutdown(/*grace_seconds=*/1);
  return report.lost.empty() ? 0 : 1;
}

// As DrainAndReport. Meanwhile further signals may end the process without a save.
std::optional<int> DrainUnlessGivenUp(const sigset_t& signals, ballast::Engine& engine,
                                      ballast::server::Server& server, const BallastdFlags& flags,
                                      ballast::server::ServiceManager& manager,
                                      ballast::server::StatusPage& status_page,
                                      ballast::server::HeldFiles* held, std::string& why_not) {
  ballast::server::StopSignals stops(isatty(STDIN_FILENO) == 1 || isatty(STDERR_FILENO) == 1,
                                     ballast::SteadySeconds());
  std::optional<int> exit_code;
  std::atomic<bool> drained = false;
  // A save may take long. Meanwhile this thread answers signals and the service manager.
  std::thread drain([&, waiting = pthread_self()] {
    exit_code = DrainAndReport(engine, server, flags, held, why_not);
    drained = true;
    // It is blocked, so it stays pending until that thread waits, and is not lost.
    pthread_kill(waiting, DrainedSignal());
  });
  while (!drained) {
    const int signal = WaitForSignal(signals, engine, held, manager, status_page);
    // Not a SIGHUP: a terminal that closes sends more than one.
    if (signal != SIGTERM && signal != SIGINT) continue;
    switch (stops.Another(ballast::SteadySeconds())) {
      case ballast::server::StopSignals::Meaning::kSame:
        break;
      case ballast::server::StopSignals::Meaning::kWait:
        spdlog::warn("signal {} again: it still drains or saves; a third one ends it unsaved",
                     signal);
        break;
      case ballast::server::StopSignals::Meaning::kEnd:
        _exit(128 + signal);
    }
  }
  drain.join();
  return exit_code;
}

void LogDrain(int signal, const ballast::Engine& engine, const BallastdFlags& flags) {
  int64_t bytes = 0;
  const auto jobs = engine.ListJobs();
  if (LeavesJobs(flags)) {
    spdlog::info("signal {}: kept in {} for the next process: {}", signal, flags.state_directory,
                 ballast::Counted(static_cast<int64_t>(jobs.size()), "job"));
    return;
  }
  for (const auto& job : jobs) bytes += job->Status().memory.state_bytes;
  const bool saves = !flags.checkpoint_directory.empty() && !jobs.empty();
  spdlog::info("signal {}: refusing new steps, at most {} s for those in progress{}", signal,
               flags.drain_seconds,
               saves ? absl::StrCat("; then saving ",
                                    ballast::Counted(static_cast<int64_t>(jobs.size()), "job"),
                                    ", ", ballast::FormatBytes(bytes), ", however long that takes")
                     : std::string());
}

}  // namespace

int main(int argc, char** argv) {
  std::set_terminate(EndWithoutResources);
  // Here, and not by an exception, which gRPC's callbacks would keep from ending the process.
  std::set_new_handler([] { EndWithout("memory"); });
  ballast::KeepHeapInOneArena();
  absl::StatusOr<BallastdFlags> flags = ballast::server::ParseBallastdFlags(argc, argv);
  if (!flags.ok()) return Fail(flags.status(), 2);
  if (!flags->upgrade.empty()) return ballast::server::UpgradeService(*flags);
  if (flags->check_state == ballast::server::kHeldState) {
    return ballast::server::CheckHeldState(*flags);
  }
  if (!flags->check_state.empty()) return ballast::server::CheckState(*flags);
  if (flags->check_config) {
    const std::string whose = flags->checked_as.empty() ? "" : " for the user " + flags->checked_as;
    std::printf("ballastd: the flags and the files that they name are good%s\n", whose.c_str());
    return 0;
  }
  if (flags->self_benchmark) return PrintSelfBenchmark(*flags);
  ballast::server::SetLogFormat(flags->log_format);
  // The holder needs a process without other threads, so it comes before everything that starts
  // one.
  if (flags->has_holder && !ballast::server::IsHeld()) {
    return ballast::server::RunHolder(
        argv, {.most_deaths = flags->most_deaths, .holds_jobs = flags->state_directory.empty()});
  }
  const auto held = ballast::server::HeldFiles::OfHolder();
  if (!held.ok()) return Fail(held.status(), 1);
  const auto last_log_lines = ballast::server::StartLog(flags->log_level);
  // Before the manager, which may start a thread.
  const sigset_t signals = BlockStopSignals();
  auto manager = ballast::server::ServiceManager::FromEnvironment();
  if (!manager.ok()) return Fail(manager.status(), 2);

  absl::Status unsavable;
  const auto checkpoints = OpenCheckpoints(*flags, unsavable);
  if (!checkpoints.ok()) return Fail(checkpoints.status(), 1);
  const auto directory = OpenStateDirectory(*flags, held->get(), checkpoints->get());
  if (!directory.ok()) return Fail(directory.status(), 1);
  std::optional<ballast::NamedMemory> memory;
  if (*directory != nullptr) {
    memory.emplace(**directory);
  } else if (*held != nullptr) {
    memory.emplace(**held);
  }
  // What is held already is not among what there is left to take.
  const bool is_first = !memory.has_value() || memory->LeftBytes() == 0;
  // In the place of a process that ran, with jobs or without, it starts although the directory of
  // checkpoints or the status page will not do for now.
  const bool goes_on =
      !is_first || (*held != nullptr && ((*held)->deaths() > 0 || (*held)->is_upgrade()));
  const absl::Status may_begin = CheckCheckpoints(unsavable, goes_on, *flags);
  if (!may_begin.ok()) return Fail(may_begin, 1);
  const absl::Status has_cluster = goes_on ? absl::OkStatus() : CheckCluster(flags->server);
  if (!has_cluster.ok()) return Fail(has_cluster, 1);
  if (!is_first && flags->memory_limit_is_default) {
    flags->memory_limit_bytes += memory->LeftBytes();
  }
  std::string threads_bound = "--threads";
  if (flags->threads == 0) {
    ballast::UsableProcessors usable = ballast::FindUsableProcessors();
    flags->threads = usable.count;
    threads_bound = std::move(usable.bound);
  }
  // It outlives the engine.
  ballast::server::LifeLog life([](const std::string& line) { spdlog::info("{}", line); });
  ballast::Engine engine({.memory_limit_bytes = flags->memory_limit_bytes,
                          .threads = flags->threads,
                          .warn = [](const std::string& line) { spdlog::warn("{}", line); },
                          .tell =
                              [&life](const auto& event) {
                                if (!event.is_step) return life.Tell(event);
                                spdlog::debug("{}", ballast::server::LineOf(event.job, event.text));
                              },
                          .named_memory = memory.has_value() ? &*memory : nullptr,
                          .checkpoints = checkpoints->get(),
                          .goes_on = goes_on});
  const ballast::PeriodicThread look_at_work("log-of-work", std::chrono::seconds(1),
                                             [&] { life.Look(engine.ListActivities()); });
  // A probe that asks whether it lives need not wait for what it has to take over.
  ballast::server::StatusPage status_page(flags->status, engine.named_memory());
  const absl::Status visible = status_page.Start();
  if (!visible.ok() && !goes_on) return Fail(visible, 2);
  if (!visible.ok()) status_page.StartLater(visible);
  const ballast::server::ServiceHistory history =
      TakeOverJobs(engine, held->get(), directory->get());
  ballast::server::DiagnosticsService diagnostics(
      engine, {.settings = flags->settings, .history = history, .last_log_lines = last_log_lines});
  ballast::server::ServerOptions server_options = flags->server;
  server_options.more_services.push_back(&diagnostics);
  // After jobs are back, which have taken addresses.
  const absl::Status can_start = ballast::server::CheckThatServerCanStart();
  if (!can_start.ok()) FailWithJobs(can_start, 1);
  // And because a worker that returned earlier would be told that there is no such job, and give
  // up.
  auto server = ballast::server::Server::Start(engine, server_options);
  if (!server.ok()) FailWithJobs(server.status(), 1);
  diagnostics.Describes(**server);
  status_page.Show(engine, **server, history);
  LogCheckpoints(engine.checkpoints(), *flags);
  // Workers wait for a service that comes back.
  if (flags->startup_benchmark && is_first) LogSelfBenchmark(*flags);
  if (!flags->port_file.empty()) {
    const absl::Status written = WritePortFile(flags->port_file, (*server)->addresses());
    if (!written.ok()) FailWithJobs(written, 1);
  }
  const std::string listening =
      absl::StrCat("listening on ", absl::StrJoin((*server)->addresses(), ", "));
  spdlog::info("ballastd {}, memory limit {}, {} ({}), kernel {}, version {}", listening,
               ballast::FormatBytes(flags->memory_limit_bytes),
               ballast::Counted(flags->threads, "thread"), threads_bound, ballast::KernelTarget(),
               ballast::VersionAndBuild());
  spdlog::log(flags->server.insecure ? spdlog::level::warn : spdlog::level::info, "access: {}",
              (*server)->AccessLine());
  LogWhatOutlives(engine.named_memory(), directory->get());
  // Last: an end before this counts as one more of a row, or gives up the upgrade (holder.h).
  if (*held != nullptr) (*held)->Ready(ballast::kKeptFormat);
  serves = true;

  std::optional<ballast::server::UnusedJobs> unused_jobs;
  std::optional<ballast::PeriodicThread> forgets;  // It is never destroyed: see the end.
  if (flags->forget_after_seconds > 0) {
    unused_jobs.emplace(engine, absl::Seconds(flags->forget_after_seconds));
    forgets.emplace("forgets", std::chrono::seconds(1),
                    [&] { unused_jobs->Look(ballast::SteadyNow()); });
  }
  (*manager)->Ready(listening);
  std::optional<int> exit_code;
  std::string why_not;
  while (!exit_code.has_value()) {
    const int signal = WaitForSignal(signals, engine, held->get(), **manager, status_page);
    // Left of a drain whose end was seen before its signal was taken.
    if (signal == DrainedSignal()) continue;
    if (signal == ballast::server::FarewellSignal()) {
      if (*held != nullptr) SayFarewell(engine, **server, **held);
      continue;
    }
    LogDrain(signal, engine, *flags);
    (*manager)->Saving("saving all jobs");
    exit_code = DrainUnlessGivenUp(signals, engine, **server, *flags, **manager, status_page,
                                   held->get(), why_not);
    if (exit_code.has_value()) break;
    // Not before the drain is over: until then another signal could end the process unsaved.
    spdlog::error(
        "the service does not stop, because that would lose what could not be saved: mend the "
        "cause, or save elsewhere (ballast save), or give it up (ballast close), and send the "
        "signal again");
    (*manager)->StopRefused(absl::StrCat("not stopped, because not saved: ", why_not));
  }
  (*server)->LeaveCluster(/*keeps_jobs=*/LeavesJobs(*flags));
  (*manager)->Stopping("stopped");
  spdlog::default_logger()->flush();  // Not its end: other threads still log.
  std::fflush(nullptr);
  // Every job is saved and every call has ended. Shutting gRPC's library down would sometimes wait
  // ten seconds for one of its pollers.
  _exit(*exit_code);
}
