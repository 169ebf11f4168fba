#include "cpu_optimizer_service/self_benchmark.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/host/arena.h"
#include "cpu_optimizer_service/host/huge_pages.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/kernels/roofline.h"

namespace ballast {
namespace {

// Of memory for an element: gradient, three planes, shard.
constexpr int64_t kBytesPerElement = 2 + 4 + 4 + 4 + 2;
constexpr int kMaxRounds = 100;

using Clock = std::chrono::steady_clock;

double Seconds(absl::FunctionRef<void()> body) {
  const Clock::time_point begin = Clock::now();
  body();
  return SecondsSince(begin);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Of a rule of two rounds each one moves a plane; the first is measured.
size_t PlanesMoved(const HyperParameters& values) {
  return HasTwoRounds(values.rule) ? 1 : PlanesOf(values).size();
}

// The arrays of an update of whole chunks.
class Arrays {
 public:
  static absl::StatusOr<Arrays> Create(int64_t chunks, ArenaFactory& arenas, TaskPool& pool) {
    Arrays arrays;
    arrays.chunks_ = chunks;
    const int64_t elements = chunks * kMaxChunkElements;
    // The sizes are of one element each, in the order by which Traffic and Run find the arenas.
    for (const int64_t bytes : {2, 4, 4, 4, 2}) {
      BALLAST_ASSIGN_OR_RETURN(
          arrays.arenas_.emplace_back(),
          // All pages are there before anything is measured, near the threads that will use them.
          arenas.Create(elements * bytes, "the self-benchmark", ArenaFactory::Touch::kNow));
    }
    // The moments stay zero, and become what the gradient makes them.
    pool.ForEach(chunks, [&](int64_t chunk) {
      const UpdateTraffic traffic = arrays.Traffic(chunk, 3);
      // Ordinary values keep the kernel on the way that it takes in training (kernels/adam-inl.h).
      std::fill_n(const_cast<uint16_t*>(traffic.gradient), kMaxChunkElements,
                  FloatToBFloat16(0.01f));
      std::fill_n(traffic.planes[0], kMaxChunkElements, 0.5f);
    });
    return arrays;
  }

  int64_t chunks() const { return chunks_; }
  std::optional<double> huge_page_share() const {
    // The master plane stands for all, which are made in the same way.
    return HugePageShare(arenas_[1]->data(), arenas_[1]->size_bytes());
  }

  // `planes`: 1 to 3.
  UpdateTraffic Traffic(int64_t chunk, size_t planes) const {
    UpdateTraffic traffic = {.elements = kMaxChunkElements,
                             .gradient = At<uint16_t>(0, chunk),
                             .planes = {},
                             .shard = At<uint16_t>(4, chunk)};
    for (size_t plane = 0; plane < planes; ++plane) {
      traffic.planes[plane] = At<float>(static_cast<int>(plane) + 1, chunk);
    }
    return traffic;
  }
  RuleRun Run(int64_t chunk, const HyperParameters& values) const {
    const UpdateTraffic at = Traffic(chunk, PlanesMoved(values));
    RuleRun run = {.elements = at.elements,
                   .gradient = at.gradient,
                   .gradient_dtype = DType::kBFloat16,
                   .to = at.planes,
                   .shard = at.shard,
                   .shard_dtype = DType::kBFloat16,
                   .values = &values,
                   // Any but the first will do: the work is the same.
                   .update_count = 10};
    std::ranges::copy(at.planes, run.from.begin());
    if (HasTwoRounds(values.rule)) {
      run.from[1] = run.from[0];
      run.to[1] = run.to[0];
    }
    return run;
  }

 private:
  template <class T>
  T* At(int arena, int64_t chunk) const {
    return reinterpret_cast<T*>(arenas_[arena]->data()) + chunk * kMaxChunkElements;
  }

  int64_t chunks_ = 0;
  std::vector<std::unique_ptr<Arena>> arenas_;
};

// Runs body(chunk) for all chunks, somehow.
using ForChunks = absl::FunctionRef<void(absl::FunctionRef<void(int64_t)>)>;

struct Times {
  std::vector<double> roofline;
  std::vector<double> kernel;
};

void MeasureRound(const Arrays& arrays, const HyperParameters& values, int prefetch_ahead,
                  ForChunks for_chunks, Times& times) {
  const size_t planes = PlanesMoved(values);
  // The two are measured one after the other in every round. What slows the host for a while slows
  // both, and hardly shows in their ratio.
  times.roofline.push_back(Seconds([&] {
    for_chunks([&](int64_t chunk) { MoveTraffic(arrays.Traffic(chunk, planes), prefetch_ahead); });
  }));
  times.kernel.push_back(Seconds(
      [&] { for_chunks([&](int64_t chunk) { UpdateByRule(arrays.Run(chunk, values)); }); }));
}

// The distance with which the roofline is highest; the first where there is no time to try.
int BestPrefetch(const Arrays& arrays, ForChunks for_chunks, double seconds) {
  int best = kPrefetchAheadElements[0];
  double best_seconds = 0;
  double spent_seconds = 0;
  for (const int ahead : kPrefetchAheadElements) {
    for (int turn = 0; turn < 2; ++turn) {  // The first of all also warms up.
      const double taken = Seconds([&] {
        for_chunks([&](int64_t chunk) { MoveTraffic(arrays.Traffic(chunk, 3), ahead); });
      });
      spent_seconds += taken;
      if (best_seconds == 0 || taken < best_seconds) {
        best_seconds = taken;
        best = ahead;
      }
    }
    // The search gets an eighth of the time.
    if (spent_seconds * 8 > seconds) break;
  }
  return best;
}

KernelSpeed SpeedOf(const HyperParameters& values, int threads, int64_t elements,
                    const Times& times) {
  std::vector<double> fractions;
  for (size_t round = 0; round < times.kernel.size(); ++round) {
    // Both moved the same elements, so the ratio of the times is that of the speeds.
    fractions.push_back(times.roofline[round] / times.kernel[round]);
  }
  const auto count = static_cast<double>(elements);
  const bool has_momentum = values.rule == Rule::kSgd && values.momentum > 0;
  return {.optimizer = absl::StrCat(TitleOf(values), has_momentum ? " momentum" : ""),
          .planes = static_cast<int>(PlanesMoved(values)),
          .threads = threads,
          .roofline_elements_per_second = count / Median(times.roofline),
          .kernel_elements_per_second = count / Median(times.kernel),
          .fraction = Median(std::move(fractions))};
}

std::string Row(const KernelSpeed& speed) {
  const auto column = [&](double elements_per_second) {
    return absl::StrFormat("%7.1f GB/s %7.3f Gparam/s",
                           elements_per_second * TrafficBytesPerElement(speed.planes) / 1e9,
                           elements_per_second / 1e9);
  };
  return absl::StrFormat("%-12s %-12s %s   %s   %5.2f\n", speed.optimizer,
                         absl::StrCat(speed.threads, speed.threads == 1 ? " thread" : " threads"),
                         column(speed.roofline_elements_per_second),
                         column(speed.kernel_elements_per_second), speed.fraction);
}

}  // namespace

SelfBenchmarkOptions BriefSelfBenchmark(int threads, int64_t memory_limit_bytes) {
  return {.threads = threads,
          .memory_bytes = std::min(int64_t{256} << 20, memory_limit_bytes / 8),
          // Less than the third of a second that the header promises: the last round may end later.
          .seconds = 0.28};
}

absl::StatusOr<SelfBenchmark> RunSelfBenchmark(const SelfBenchmarkOptions& options) {
  const Clock::time_point begin = Clock::now();
  const int64_t chunks = options.memory_bytes / (kMaxChunkElements * kBytesPerElement);
  if (chunks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the self-benchmark needs at least ", kMaxChunkElements * kBytesPerElement,
                     " bytes of memory and has ", options.memory_bytes));
  }
  TaskPool pool(options.threads, *options.topology);
  const std::unique_ptr<ArenaFactory> arenas = MakeAnonymousArenaFactory(&pool);
  BALLAST_ASSIGN_OR_RETURN(const Arrays arrays, Arrays::Create(chunks, *arenas, pool));

  const auto with_all = [&](absl::FunctionRef<void(int64_t)> body) { pool.ForEach(chunks, body); };
  // The calling thread does all of it, in the same memory as the pool's threads.
  const auto with_one = [&](absl::FunctionRef<void(int64_t)> body) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
  };
  const std::vector<HyperParameters>& rules = options.rules;
  std::vector<Times> all(rules.size());
  std::vector<Times> one(rules.size());
  const int ahead = BestPrefetch(arrays, with_all, options.seconds);
  double round_seconds = 0;
  int rounds = 0;
  // Another round begins only if one that takes as long as the last would end in time.
  while (rounds == 0 ||
         (rounds < kMaxRounds && SecondsSince(begin) + round_seconds < options.seconds)) {
    round_seconds = Seconds([&] {
      for (size_t i = 0; i < rules.size(); ++i) {
        MeasureRound(arrays, rules[i], ahead, with_all, all[i]);
        MeasureRound(arrays, rules[i], ahead, with_one, one[i]);
      }
    });
    ++rounds;
  }

  SelfBenchmark result;
  result.kernel_target = KernelTarget();
  result.elements = chunks * kMaxChunkElements;
  result.rounds = rounds;
  for (size_t i = 0; i < rules.size(); ++i) {
    result.all_threads.push_back(SpeedOf(rules[i], pool.threads(), result.elements, all[i]));
    result.one_thread.push_back(SpeedOf(rules[i], 1, result.elements, one[i]));
  }
  // Arrays that fit in the last cache say nothing about memory.
  const int64_t cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  // sysconf says 0 where it does not know. Then all arrays count as large.
  const bool beyond_cache = chunks * kMaxChunkElements * kBytesPerElement >= 2 * cache_bytes;
  result.facts = {.threads = pool.threads(),
                  .processors = std::min(options.topology->processors(), UsableProcessorCount()),
                  .nodes = static_cast<int>(options.topology->nodes.size()),
                  .bound = pool.bound(),
                  .huge_page_share = arrays.huge_page_share(),
                  .kernel_fraction =
                      beyond_cache ? std::optional(result.all_threads[0].fraction) : std::nullopt};
  return result;
}

std::vector<std::string> HostWarnings(const HostFacts& facts) {
  constexpr double kFarBelow = 0.8;
  std::vector<std::string> warnings;
  if (facts.threads > facts.processors) {
    warnings.push_back(absl::StrFormat(
        "threads: %d for updates take turns on the %d processors that this process may use",
        facts.threads, facts.processors));
  }
  if (facts.threads < facts.processors) {
    warnings.push_back(
        absl::StrFormat("threads: %d for updates, where this process may use %d processors",
                        facts.threads, facts.processors));
  }
  if (facts.nodes > 1 && !facts.bound) {
    warnings.push_back(absl::StrFormat(
        "NUMA: threads could not be bound to the %d nodes, so memory is often far from its user",
        facts.nodes));
  }
  std::string pages = HugePageWarning(facts.huge_page_share, "the self-benchmark");
  if (!pages.empty()) warnings.push_back(std::move(pages));
  if (facts.kernel_fraction.has_value() && *facts.kernel_fraction < kFarBelow) {
    warnings.push_back(absl::StrFormat(
        "kernel: updates reach %.2f of what this host's memory allows; is another process busy?",
        *facts.kernel_fraction));
  }
  return warnings;
}

std::string ToLine(const SelfBenchmark& result) {
  const KernelSpeed& all = result.all_threads[0];
  const KernelSpeed& one = result.one_thread[0];
  return absl::StrFormat(
      "self-benchmark: %s updates %.3f Gparam/s with %d threads (%.2f of the roofline), %.3f with "
      "one (%.2f), %d NUMA nodes, kernel %s",
      all.optimizer, all.kernel_elements_per_second / 1e9, all.threads, all.fraction,
      one.kernel_elements_per_second / 1e9, one.fraction, result.facts.nodes, result.kernel_target);
}

std::string ToTable(const SelfBenchmark& result) {
  std::string text =
      absl::StrFormat("%d processors, %d NUMA nodes, kernel %s, %.1f million elements, %d rounds\n",
                      result.facts.processors, result.facts.nodes, result.kernel_target,
                      static_cast<double>(result.elements) / 1e6, result.rounds);
  absl::StrAppendFormat(&text, "%-12s %-12s %-28s   %-28s   %s\n", "", "", "memory traffic alone",
                        "update of bf16 gradients", "fraction");
  for (size_t i = 0; i < result.all_threads.size(); ++i) {
    text += Row(result.all_threads[i]);
    if (result.all_threads[i].threads > 1) text += Row(result.one_thread[i]);
  }
  for (const std::string& warning : HostWarnings(result.facts)) {
    absl::StrAppend(&text, "warning: ", warning, "\n");
  }
  return text;
}

}  // namespace ballast
