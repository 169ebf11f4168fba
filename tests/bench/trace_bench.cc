// What a timeline costs: an event that nobody asked for, one that is recorded, alone and among many
// threads, and a step that is traced against one that is not.
//
//   trace_bench [--short] [--json FILE]
#include <benchmark/benchmark.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/bench/figures.h"

namespace ballast::bench {
namespace {

constexpr int64_t kSpans = 100'000;  // By each thread.
constexpr std::chrono::seconds kStepLimit(60);
constexpr int kThreadCounts[] = {1, 2, 16};

struct Arguments {
  bool brief = false;
  std::string json_path;
};

double ThreadCpuNs() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

double Seconds(const auto& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Processor time of a span: so that threads that wait for each other show, and those that wait for
// a core do not.
double SpanNs(TraceRecorder& recorder, int threads) {
  std::vector<std::future<double>> spent;
  for (int t = 0; t < threads; ++t) {
    spent.push_back(std::async(std::launch::async, [&recorder, t] {
      const double begin_ns = ThreadCpuNs();
      for (int64_t i = 0; i < kSpans; ++i) {
        const TraceSpan span(recorder, TraceEventKind::kUpdated, /*step=*/1, t);
      }
      return ThreadCpuNs() - begin_ns;
    }));
  }
  double total_ns = 0;
  for (std::future<double>& one : spent) total_ns += one.get();
  return total_ns / static_cast<double>(kSpans * threads);
}

void MeasureSpans(benchmark::State& state, bool on, int threads, Figures& figures) {
  std::vector<double> samples;
  for (auto _ : state) {
    TraceRecorder recorder;
    if (on && !recorder.Start(1, 1, kSpans * threads).ok()) state.SkipWithError("cannot start");
    samples.push_back(SpanNs(recorder, threads));
    recorder.Stop();
    state.SetIterationTime(samples.back() / 1e9);
  }
  const std::string key = on ? absl::StrCat("span_on_", threads, "_threads_ns") : "span_off_ns";
  state.counters["ns"] = Median(samples);
  figures.Add(key, samples, "ns");
}

class CommitListener : public RankListener {
 public:
  void OnWaiting(uint64_t, const std::vector<int>&) override {}
  void OnSealRefused(uint64_t, const SealRefusal&) override {}
  void OnNorm(const StepNorm&) override {}
  void OnVoteRefused(StepAttempt, const absl::Status&) override {}
  void OnProvisionalWeights(uint64_t, int, WeightBuffer) override {}
  void OnDecision(const StepOutcome&, absl::Span<const int>) override {}
  void OnWeights(uint64_t, int, WeightBuffer) override {}
  void OnDetached(const absl::Status&) override {}
  void OnCommitted(uint64_t step, double) override {
    MutexLock lock(mutex_);
    committed_step_ = step;
    changed_.NotifyAll();
  }
  absl::Status Await(uint64_t step) {
    const auto deadline = std::chrono::steady_clock::now() + kStepLimit;
    MutexLock lock(mutex_);
    while (committed_step_ < step) {
      if (!changed_.WaitUntil(mutex_, deadline)) {
        return absl::DeadlineExceededError(absl::StrCat("step ", step, " was never committed"));
      }
    }
    return absl::OkStatus();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  uint64_t committed_step_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A job of one rank without any transport.
class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Create(int64_t elements) {
    std::unique_ptr<Training> self(new Training(elements));
    JobSpec spec;
    spec.name = "trace_bench";
    spec.groups = {{.name = "g", .hyper_parameters = {}}};
    spec.layout.parameters = {{.name = "w", .shape = {elements}}};
    spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = elements}};
    spec.max_micro_steps = 1;
    BALLAST_ASSIGN_OR_RETURN(self->job_, self->engine_.CreateJob(std::move(spec)));
    const std::vector<float> weights(kMaxChunkElements, 0.5f);
    for (int chunk = 0; chunk < self->chunks(); ++chunk) {
      const absl::Span<const std::byte> piece(
          reinterpret_cast<const std::byte*>(weights.data()),
          self->job_->layout().chunks()[chunk].elements * sizeof(float));
      BALLAST_RETURN_IF_ERROR(self->job_->WriteInitialWeights(chunk, {&piece, 1}).status());
    }
    BALLAST_ASSIGN_OR_RETURN(const Attachment attachment,
                             self->job_->Attach({.rank = 0, .process_id = "p"}));
    BALLAST_ASSIGN_OR_RETURN(self->stream_,
                             self->job_->OpenStream({.uid = self->job_->uid(),
                                                     .rank = 0,
                                                     .process_id = "p",
                                                     .generation = attachment.generation},
                                                    self->listener_));
    return self;
  }

  // Seconds of a whole step.
  absl::StatusOr<double> Step() {
    ++step_;
    absl::Status status;
    const double seconds = Seconds([&] { status = DoStep(); });
    if (!status.ok()) return status;
    return seconds;
  }
  // The same, with a trace; `events` gets their number.
  absl::StatusOr<double> TracedStep(double& events) {
    std::atomic<bool> wanted = true;  // Before the future, which waits for whoever reads it.
    auto trace = std::async(std::launch::async, [&] {
      return job_->TraceSteps(1, [&wanted] { return wanted.load(); });
    });
    while (!job_->trace().wants(step_ + 1) &&
           trace.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    }
    const absl::StatusOr<double> seconds = Step();
    // A step that failed is never over, and nobody else would end its trace.
    if (!seconds.ok()) {
      wanted = false;
      return seconds;
    }
    BALLAST_ASSIGN_OR_RETURN(const Trace taken, trace.get());
    events = static_cast<double>(taken.events.size());
    return seconds;
  }

 private:
  explicit Training(int64_t elements)
      : engine_({.memory_limit_bytes = 20 * elements + (int64_t{256} << 20)}) {}

  int chunks() const { return static_cast<int>(job_->layout().chunks().size()); }
  absl::Status DoStep() {
    BALLAST_RETURN_IF_ERROR(stream_->BeginStep(step_, {}));
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      const size_t size_bytes = 2 * job_->layout().chunks()[chunk].elements;
      const absl::Span<const std::byte> piece(gradient_.data(), size_bytes);
      BALLAST_RETURN_IF_ERROR(
          stream_
              ->Contribute({.step = step_, .chunk = chunk, .final = true, .payload = {&piece, 1}})
              .status());
    }
    BALLAST_RETURN_IF_ERROR(stream_->EndMicroStep(step_, 0, {}));
    BALLAST_ASSIGN_OR_RETURN(const std::optional<SealRefusal> refusal, stream_->Seal(step_, 1));
    if (refusal.has_value()) return refusal->status;
    return listener_->Await(step_);
  }

  Engine engine_;
  std::shared_ptr<Job> job_;
  const std::shared_ptr<CommitListener> listener_ = std::make_shared<CommitListener>();
  std::unique_ptr<RankStream> stream_;
  const std::vector<std::byte> gradient_ =
      std::vector<std::byte>(2 * kMaxChunkElements, std::byte{0x3c});  // bf16 0.0115.
  uint64_t step_ = 0;
};

// In turns, since machines drift.
absl::Status MeasureSteps(benchmark::State& state, int64_t elements, Figures& figures) {
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<Training> training, Training::Create(elements));
  BALLAST_RETURN_IF_ERROR(training->Step().status());  // Warms up.
  std::vector<double> plain, traced, ratios;
  double events = 0;
  for (auto _ : state) {
    BALLAST_ASSIGN_OR_RETURN(const double without, training->Step());
    BALLAST_ASSIGN_OR_RETURN(const double with, training->TracedStep(events));
    plain.push_back(1e3 * without);
    traced.push_back(1e3 * with);
    ratios.push_back(with / without);
    state.SetIterationTime(without + with);
  }
  figures.Add("step_untraced_ms", plain, "ms");
  figures.Add("step_traced_ms", traced, "ms");
  figures.Add("step_traced_to_untraced", ratios, "");
  figures.Add("events_of_step", {events}, "");
  state.counters["traced_to_untraced"] = Median(ratios);
  return absl::OkStatus();
}

absl::StatusOr<Arguments> Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    absl::string_view word = argv[i];
    if (word == "--short") {
      arguments.brief = true;
    } else if (word == "--json" && i + 1 < argc) {
      arguments.json_path = argv[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "unknown argument '", word, "'; usage: trace_bench [--short] [--json FILE]"));
    }
  }
  return arguments;
}

absl::Status Run(int argc, char** argv) {
  BALLAST_ASSIGN_OR_RETURN(const Arguments arguments, Parse(argc, argv));
  Figures figures("trace");
  const auto add = [&](const std::string& name, int64_t rounds, const auto& body) {
    benchmark::RegisterBenchmark(name.c_str(), body)
        ->UseManualTime()
        ->Iterations(rounds)
        ->Unit(benchmark::kMillisecond);
  };
  const int64_t rounds = arguments.brief ? 5 : 15;
  add("span_off", rounds,
      [&](benchmark::State& state) { MeasureSpans(state, /*on=*/false, 1, figures); });
  for (const int threads : kThreadCounts) {
    add(absl::StrCat("span_on/", threads), rounds, [&, threads](benchmark::State& state) {
      MeasureSpans(state, /*on=*/true, threads, figures);
    });
  }
  absl::Status measured;
  const int64_t elements = arguments.brief ? int64_t{8} << 20 : int64_t{64} << 20;
  add("step", 3 * rounds, [&](benchmark::State& state) {
    measured = MeasureSteps(state, elements, figures);
    if (!measured.ok()) state.SkipWithError(measured.ToString().c_str());
  });
  figures.info()["elements"] = elements;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  BALLAST_RETURN_IF_ERROR(measured);
  return arguments.json_path.empty() ? absl::OkStatus() : figures.Write(arguments.json_path);
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  const absl::Status status = ballast::bench::Run(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "trace_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
