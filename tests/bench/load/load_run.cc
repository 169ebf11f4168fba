#include "tests/bench/load/load_run.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <barrier>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/sha256.h"
#include "proto/status.h"
#include "tests/bench/load/load_service.h"

namespace ballast::bench {
namespace {

constexpr int kRoundTrips = 200;

ResidentMemory Sum(const ResidentMemory& a, const ResidentMemory& b) {
  return {.total_bytes = a.total_bytes + b.total_bytes,
          .anonymous_bytes = a.anonymous_bytes + b.anonymous_bytes,
          .shared_bytes = a.shared_bytes + b.shared_bytes,
          .peak_bytes = a.peak_bytes + b.peak_bytes};
}

absl::StatusOr<Usage> UsageNow(const LoadService& service) {
  Usage usage;
  usage.time = std::chrono::steady_clock::now();
  BALLAST_ASSIGN_OR_RETURN(usage.worker_cpu_seconds, CpuSeconds(getpid()));
  BALLAST_ASSIGN_OR_RETURN(usage.worker_memory, ResidentMemoryOf(getpid()));
  for (const int port : service.tcp_ports()) {
    const SocketBytes bytes = TcpBytes(port);
    SocketBytes& all = usage.sockets ? *usage.sockets : usage.sockets.emplace();
    all.sent += bytes.sent;
    all.received += bytes.received;
  }
  for (const pid_t pid : service.pids()) {
    BALLAST_ASSIGN_OR_RETURN(const double seconds, CpuSeconds(pid));
    BALLAST_ASSIGN_OR_RETURN(const ResidentMemory memory, ResidentMemoryOf(pid));
    usage.service_cpu_seconds = usage.service_cpu_seconds.value_or(0) + seconds;
    usage.service_memory = Sum(usage.service_memory.value_or(ResidentMemory()), memory);
  }
  return usage;
}

// The ranks of all jobs, a thread each, from joining to the comparison of weights.
class Load {
 public:
  Load(const LoadOptions& options, LoadService& service)
      : options_(options),
        service_(service),
        result_{.steps = {}},
        meeting_(options.jobs * options.ranks, Met{this}) {
    // Names of their own, since a service that runs already may have other jobs.
    for (int64_t job = 0; job < options.jobs; ++job) {
      specs_.push_back(MakeLoadJob(options, absl::StrCat("ballast-bench-", getpid(), "-", job)));
    }
    result_.steps.resize(options.jobs);
    for (auto& ranks : result_.steps) ranks.resize(options.ranks);
    outcomes_.resize(options.jobs * options.ranks);
  }

  absl::StatusOr<LoadResult> Run() {
    BALLAST_ASSIGN_OR_RETURN(result_.idle, UsageNow(service_));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      threads.emplace_back([this, i] {
        outcomes_[i].status = RunRank(i);
        if (!outcomes_[i].status.ok()) meeting_.arrive_and_drop();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Outcome& outcome : outcomes_) BALLAST_RETURN_IF_ERROR(outcome.status);
    BALLAST_RETURN_IF_ERROR(between_status_);
    BALLAST_RETURN_IF_ERROR(CloseJobs());
    Conclude();
    return std::move(result_);
  }

 private:
  // What one rank leaves behind.
  struct Outcome {
    absl::Status status;
    int64_t payload_bytes_up = 0;
    int64_t payload_bytes_down = 0;
    bool shares_memory = false;
    std::map<int, std::string> digests;
  };
  struct Met {
    Load* self;
    void operator()() noexcept { self->AllMet(); }
  };

  absl::Status RunRank(size_t index) {
    const size_t job = index / options_.ranks;
    const int rank = static_cast<int>(index % options_.ranks);
    // A gradient is due to the microsecond, not to the 50 that a thread's timers may be late.
    prctl(PR_SET_TIMERSLACK, 1UL);
    JobSpec spec = specs_[job];
    BALLAST_ASSIGN_OR_RETURN(auto channel, service_.NewChannel(rank, spec));
    BALLAST_ASSIGN_OR_RETURN(const auto self,
                             LoadRank::Join(std::move(channel), options_, spec, rank));
    meeting_.arrive_and_wait();  // Nobody's first steps run beside another's beginning.
    for (int64_t i = 0; i < options_.warmup; ++i) {
      BALLAST_RETURN_IF_ERROR(self->Step().status());
    }
    meeting_.arrive_and_wait();
    std::vector<RankStep>& steps = result_.steps[job][rank];
    for (int64_t i = 0; i < options_.steps; ++i) {
      BALLAST_ASSIGN_OR_RETURN(RankStep step, self->Step());
      steps.push_back(std::move(step));
    }
    meeting_.arrive_and_wait();
    return Compare(*self, outcomes_[index]);
  }

  absl::Status Compare(LoadRank& rank, Outcome& outcome) {
    outcome.payload_bytes_up = rank.payload_bytes_up();
    outcome.payload_bytes_down = rank.payload_bytes_down();
    outcome.shares_memory = rank.shares_memory();
    outcome.digests = rank.WeightDigests();
    BALLAST_RETURN_IF_ERROR(rank.ReadWeights());
    const std::map<int, std::string> committed = rank.WeightDigests();
    for (const auto& [chunk, digest] : outcome.digests) {
      if (committed.at(chunk) == digest) continue;
      return absl::InternalError(absl::StrCat("after the last step the weights of chunk ", chunk,
                                              " are not those that the service has committed"));
    }
    return absl::OkStatus();
  }

  // Between two phases, on the thread that came last, while the others wait.
  void AllMet() {
    ++meetings_;
    if (meetings_ == 1) return;
    absl::StatusOr<Usage> usage = UsageNow(service_);
    between_status_.Update(usage.status());
    if (usage.ok()) (meetings_ == 2 ? result_.begun : result_.ended) = *std::move(usage);
    // While the sessions are there, and what they share.
    if (meetings_ == 3) between_status_.Update(AskAboutJobs());
  }

  absl::Status AskAboutJobs() {
    for (JobSpec spec : specs_) {
      for (int rank = 0, asked = 0; rank < options_.ranks; ++rank) {
        BALLAST_ASSIGN_OR_RETURN(const auto channel, service_.NewChannel(rank, spec));
        if (spec.home(rank) < asked) continue;
        ++asked;
        v1::GetJobRequest request;
        request.set_name(absl::StrCat("jobs/", spec.name));
        v1::JobService::Stub stub(channel);
        v1::Job& job = result_.jobs.emplace_back();
        for (int i = 0; i < kRoundTrips; ++i) {
          grpc::ClientContext context;
          const auto begin = std::chrono::steady_clock::now();
          BALLAST_RETURN_IF_ERROR(proto::FromGrpc(stub.GetJob(&context, request, &job)));
          result_.round_trip_seconds.push_back(Seconds(std::chrono::steady_clock::now() - begin));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status CloseJobs() {
    for (JobSpec spec : specs_) {
      BALLAST_ASSIGN_OR_RETURN(const auto lead, service_.NewChannel(/*rank=*/0, spec));
      v1::CloseJobRequest request;
      request.set_name(absl::StrCat("jobs/", spec.name));
      v1::CloseJobResponse response;
      grpc::ClientContext context;
      BALLAST_RETURN_IF_ERROR(
          proto::FromGrpc(v1::JobService::Stub(lead).CloseJob(&context, request, &response)));
    }
    return absl::OkStatus();
  }

  void Conclude() {
    Sha256 all;
    for (const Outcome& outcome : outcomes_) {
      result_.payload_bytes_up += outcome.payload_bytes_up;
      result_.payload_bytes_down += outcome.payload_bytes_down;
      result_.shared_memory = result_.shared_memory || outcome.shares_memory;
      for (const auto& [chunk, digest] : outcome.digests) {
        all.AddValue(chunk);
        all.Add(digest);
      }
    }
    result_.weights_sha256 = all.Hex();
  }

  const LoadOptions options_;
  LoadService& service_;
  std::vector<JobSpec> specs_;
  // Each rank writes its own element; the rest is written while all wait, or after them.
  LoadResult result_;
  std::vector<Outcome> outcomes_;
  int meetings_ = 0;
  absl::Status between_status_;
  std::barrier<Met> meeting_;
};

}  // namespace

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<LoadService> service, LoadService::Start(options));
  return Load(options, *service).Run();
}

}  // namespace ballast::bench
