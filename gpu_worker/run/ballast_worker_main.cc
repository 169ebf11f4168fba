// ballast-worker: one rank of a training run. Wiring, nothing else.
#include <grpc/support/log.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <tbb/task_arena.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/connect.h"
#include "client/default_service.h"
#include "client/home.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "cpu_optimizer_service/engine.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/collective/launch.h"
#include "gpu_worker/run/node_home.h"
#include "gpu_worker/run/progress.h"
#include "gpu_worker/run/worker_flags.h"
#include "gpu_worker/run/worker_run.h"
#include "gpu_worker/training/service_optimizer.h"
#include "proto/cluster/cluster.h"
#include "server/server.h"
#ifdef BALLAST_HAS_CUDA
#include "gpu_worker/cuda/nvtx.h"
#include "gpu_worker/run/gpu_run.h"
#endif

namespace ballast::worker {
namespace {

// A service in this process, for runs of one worker on one machine.
class InProcessService {
 public:
  explicit InProcessService(int threads)
      : engine_({.memory_limit_bytes = MemoryLimitBytes(), .threads = threads}) {}
  static absl::StatusOr<std::unique_ptr<InProcessService>> Start(int threads) {
    auto service = std::make_unique<InProcessService>(threads);
    BALLAST_ASSIGN_OR_RETURN(service->server_,
                             server::Server::Start(service->engine_, {.listen = {}}));
    return service;
  }
  std::shared_ptr<grpc::Channel> channel() { return server_->InProcessChannel(); }

 private:
  // Half of this machine's memory; the other half is the model's.
  static int64_t MemoryLimitBytes() {
    return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE) / 2;
  }

  Engine engine_;
  // It is declared after the engine, which it serves, so it ends first.
  std::unique_ptr<server::Server> server_;
};

// The service that the flags name: another process, or one in this process, kept alive by
// `in_process`. If they name several: the rank's, and `job` gets its members and homes. For "node":
// its node's. For a cluster's: null.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectService(
    const WorkerFlags& flags, const Launch& launch, JobSpec& job,
    std::unique_ptr<InProcessService>& in_process) {
  if (flags.service == kNodeService) {
    return client::Connect(client::NodeServiceAddress(), absl::Seconds(10), flags.credentials);
  }
  if (cluster::IsAddress(flags.service)) return nullptr;  // Once it is known what the job needs.
  if (flags.service != "in-process") {
    return client::ConnectHome(flags.service, launch.rank, job, absl::Seconds(10),
                               flags.credentials);
  }
  // The others could not reach it: each would have a service of its own.
  if (launch.world_size > 1) {
    return absl::InvalidArgumentError(
        "--service=in-process serves one worker only; start ballastd for more");
  }
  BALLAST_ASSIGN_OR_RETURN(in_process, InProcessService::Start(flags.threads));
  return in_process->channel();
}

// `flags` outlive the run. `held` is of ConnectService.
MakeOptimizer ServiceOptimizer(const WorkerFlags& flags, std::shared_ptr<grpc::Channel> channel,
                               JobSpec held, std::string own_host) {
  return [&flags, channel = std::move(channel), held = std::move(held),
          own_host = std::move(own_host)](
             const TrainingJob& job, TrainingBackend& backend,
             Collective& collective) -> absl::StatusOr<std::unique_ptr<StepOptimizer>> {
    std::shared_ptr<grpc::Channel> home = channel;
    JobSpec spread = held;
    if (flags.service == kNodeService) {
      BALLAST_ASSIGN_OR_RETURN(
          home, ConnectNodeHome(channel, own_host, flags.credentials, spread, collective));
    } else if (cluster::IsAddress(flags.service)) {
      spread = job.spec;
      BALLAST_ASSIGN_OR_RETURN(
          home, ConnectClusterHome(flags.service, flags.credentials, spread, collective));
    }
    return MakeServiceOptimizer(home,
                                {.job = job,
                                 .backend = backend,
                                 .resume_directory = flags.resume,
                                 .seal_timeout = flags.options.seal_timeout,
                                 .reconnect_timeout = flags.reconnect_timeout,
                                 .shared_memory = flags.shared_memory,
                                 .members = spread.members,
                                 .homes = spread.homes},
                                collective);
  };
}

#ifdef BALLAST_HAS_CUDA
absl::StatusOr<std::unique_ptr<GpuRun>> OpenGpu(const WorkerFlags& flags, const Launch& launch,
                                                Timeline* timeline) {
  return GpuRun::Open({.local_rank = launch.local_rank,
                       .collective = flags.collective,
                       .optimizer = flags.optimizer,
                       .accumulation = flags.options.accumulation,
                       .peer_timeout = flags.peer_timeout,
                       .timeline = timeline});
}
#else
// These are the names that Main uses where there is no CUDA. OpenGpu is an error before a GpuRun is
// needed.
struct GpuRun {
  MakeBackend make_backend() { return nullptr; }
  MakeOptimizer make_local_optimizer() { return nullptr; }
};
ProfilerRanges NvtxRanges() { return {}; }
absl::StatusOr<std::unique_ptr<GpuRun>> OpenGpu(const WorkerFlags&, const Launch&, Timeline*) {
  return absl::FailedPreconditionError(
      "this ballast-worker was built without CUDA; build it where nvcc and NCCL are found, or use "
      "--device=cpu");
}
#endif

// Null where neither --trace nor a profiler reads it.
std::unique_ptr<Timeline> MakeTimeline(const WorkerFlags& flags, const Launch& launch) {
  TimelineOptions options{.rank = launch.rank};
  if (flags.device == DeviceKind::kCuda) options.profiler = NvtxRanges();
  if (flags.trace.empty()) options.most_spans = 0;
  if (flags.trace.empty() && options.profiler.begin == nullptr) return nullptr;
  return std::make_unique<Timeline>(options);
}

absl::Status WriteTimeline(const WorkerFlags& flags, const Launch& launch,
                           const Timeline* timeline) {
  if (flags.trace.empty()) return absl::OkStatus();
  return Annotate(
      timeline->Write(launch.rank == 0 ? flags.trace : absl::StrCat(flags.trace, ".", launch.rank)),
      "--trace");
}

absl::Status Main(int argc, char** argv) {
  BALLAST_ASSIGN_OR_RETURN(const WorkerFlags flags, ReadWorkerFlags(argc, argv));
  BALLAST_ASSIGN_OR_RETURN(const Launch launch, ReadLaunch());
  // It is declared before all that has its channel: a call on the channel of a server that is gone
  // crashes in gRPC.
  std::unique_ptr<InProcessService> in_process;
  std::shared_ptr<grpc::Channel> channel;
  JobSpec held;  // Only its name and ranks, and which services hold them.
  held.name = flags.options.job.name;
  held.layout.world_size = launch.world_size;
  // This comes before the workers connect: one that reaches no service ends with that error within
  // seconds.
  if (flags.optimizer == OptimizerKind::kService) {
    BALLAST_ASSIGN_OR_RETURN(channel, ConnectService(flags, launch, held, in_process));
  }
  BALLAST_ASSIGN_OR_RETURN(const Workers workers,
                           ConnectWorkers(launch, absl::ToChronoMilliseconds(flags.peer_timeout)));
  MakeOptimizer make_optimizer = MakeLocalOptimizer;
  if (flags.optimizer == OptimizerKind::kService) {
    make_optimizer = ServiceOptimizer(flags, std::move(channel), std::move(held), workers.own_host);
  }
  WorkerOptions options = flags.options;
  const std::unique_ptr<Timeline> timeline = MakeTimeline(flags, launch);
  options.timeline = timeline.get();
  // It is declared after the collective and the timeline, which it borrows.
  std::unique_ptr<GpuRun> gpu;
  if (flags.device == DeviceKind::kCuda) {
    BALLAST_ASSIGN_OR_RETURN(gpu, OpenGpu(flags, launch, timeline.get()));
    options.make_backend = gpu->make_backend();
    if (flags.optimizer == OptimizerKind::kLocal) make_optimizer = gpu->make_local_optimizer();
  }
  // An arena, not a limit of the whole process: a service in this process has threads of its own.
  tbb::task_arena arena(std::min(flags.threads, UsableProcessorCount()));
  // Its line is ended when Main returns, before main prints an error.
  Progress progress(options.trainer.steps);
  absl::Status status = arena.execute([&] {
    return RunWorker(std::move(options), *workers.collective, make_optimizer,
                     [&](const StepReport& report) {
                       if (launch.rank == 0) progress.Show(report);
                     });
  });
  // The file is written after an error, too: the run's error stays, and the file shows how far the
  // run came.
  status.Update(WriteTimeline(flags, launch, timeline.get()));
  return status;
}

}  // namespace
}  // namespace ballast::worker

int main(int argc, char** argv) {
  // A write to a lost peer (Gloo's and gRPC's sockets), or beyond the limit on a file's size, must
  // return an error, not end the process without a message.
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  // gRPC's own lines name its source files; an error's one line is for the user.
  gpr_set_log_function([](gpr_log_func_args* line) { spdlog::debug("grpc: {}", line->message); });
  // The log of a service in this process: standard output is for the run's progress.
  spdlog::set_default_logger(spdlog::stderr_logger_mt("ballastd"));
  // Before the first big allocation; the client would do it only when it connects.
  ballast::KeepHeapWarm();
  const absl::Status status = ballast::worker::Main(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "ballast-worker: %s\n", std::string(status.message()).c_str());
  // deploy/run_workers.py looks for the rank that failed first.
  return status.GetPayload(ballast::worker::kPeerLost).has_value() ? 3 : 1;
}
