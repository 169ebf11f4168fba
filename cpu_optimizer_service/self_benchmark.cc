#include "cpu_optimizer_service/self_benchmark.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
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

constexpr int kMaxRounds = 25;
constexpr int64_t kHalvesBytes = 2 * kMaxChunkElements;  // Of a chunk's gradient or shard: bf16.
// Adam's, without amsgrad: as many as any update here has.
constexpr Plane kPlanes[] = {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq};

using Clock = std::chrono::steady_clock;

double Seconds(absl::FunctionRef<void()> body) {
  const Clock::time_point begin = Clock::now();
  body();
  return SecondsSince(begin);
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

// Of a rule of two rounds each one moves a plane; the first is measured.
PlaneList PlanesMoved(const HyperParameters& values) {
  const PlaneList planes = PlanesOf(values);
  return HasTwoRounds(values.rule) ? planes.first(1) : planes;
}

int64_t StoredBytesOf(PlaneList planes, StateFormat format, int64_t elements) {
  int64_t bytes = 0;
  for (const Plane plane : StoredPlanesOf(planes, format)) {
    bytes += StoredBytes(format, plane, elements);
  }
  return bytes;
}

// Reads the gradient and the state, writes the state and the shard.
double TrafficPerElement(const BenchmarkedUpdate& update) {
  const int64_t state = StoredBytesOf(PlanesMoved(update.values), update.format, kPackedGroup);
  return 2 + 2 * static_cast<double>(state) / kPackedGroup + 2;
}

// The arrays of updates of whole chunks: gradients and shards for all, and a state in each format.
class Arrays {
 public:
  static absl::StatusOr<Arrays> Create(int64_t chunks, const std::set<StateFormat>& formats,
                                       ArenaFactory& arenas, TaskPool& pool) {
    Arrays arrays;
    arrays.chunks_ = chunks;
    const auto create = [&](int64_t chunk_bytes) {
      // All pages are there before anything is measured, near the threads that will use them.
      return arenas.Create(chunks * chunk_bytes, "the self-benchmark", ArenaFactory::Touch::kNow);
    };
    BALLAST_ASSIGN_OR_RETURN(arrays.gradients_, create(kHalvesBytes));
    BALLAST_ASSIGN_OR_RETURN(arrays.shards_, create(kHalvesBytes));
    for (const StateFormat format : formats) {
      for (const Plane plane : StoredPlanesOf(kPlanes, format)) {
        BALLAST_ASSIGN_OR_RETURN(arrays.states_[format].emplace_back(),
                                 create(StoredBytes(format, plane, kMaxChunkElements)));
      }
    }
    // The moments stay zero, and become what the gradient makes them. Ordinary values keep the kernel on
    // the way that it takes in training (kernels/turns-inl.h).
    const std::vector<float> weights(kMaxChunkElements, 0.5f);
    pool.ForEach(chunks, [&](int64_t chunk) {
      std::fill_n(At<uint16_t>(*arrays.gradients_, chunk, kHalvesBytes), kMaxChunkElements,
                  FloatToBFloat16(0.01f));
      for (const StateFormat format : formats) {
        WritePlane(arrays.State(chunk, kPlanes, format), Plane::kMaster, 0, weights);
      }
    });
    return arrays;
  }

  // Of gradients, shards and states.
  static int64_t ChunkBytes(const std::set<StateFormat>& formats) {
    int64_t bytes = 2 * kHalvesBytes;
    for (const StateFormat format : formats) {
      bytes += StoredBytesOf(kPlanes, format, kMaxChunkElements);
    }
    return bytes;
  }

  int64_t chunks() const { return chunks_; }
  std::optional<double> huge_page_share() const {
    // The master plane stands for all, which are made in the same way.
    Arena& master = *states_.begin()->second[0];
    return HugePageShare(master.data(), master.size_bytes());
  }

  UpdateTraffic Traffic(int64_t chunk, const BenchmarkedUpdate& update) const {
    return {.elements = kMaxChunkElements,
            .gradient = At<uint16_t>(*gradients_, chunk, kHalvesBytes),
            .state = State(chunk, PlanesMoved(update.values), update.format),
            .shard = At<uint16_t>(*shards_, chunk, kHalvesBytes)};
  }

  void Update(int64_t chunk, const BenchmarkedUpdate& update) const {
    const UpdateTraffic at = Traffic(chunk, update);
    RuleRun run = {.elements = at.elements,
                   .gradient = at.gradient,
                   .gradient_dtype = DType::kBFloat16,
                   .shard = at.shard,
                   .shard_dtype = DType::kBFloat16,
                   .values = &update.values,
                   // Any but the first will do: the work is the same.
                   .update_count = 10};
    if (update.format != StateFormat::kFloat32) {
      return UpdatePacked({.rule = run, .from = at.state, .to = at.state});
    }
    const PlaneList moved = PlanesMoved(update.values);
    for (size_t place = 0; place < PlanesOf(update.values).size(); ++place) {
      run.from[place] = run.to[place] = at.state[moved[std::min(place, moved.size() - 1)]];
    }
    UpdateByRule(run);
  }

 private:
  template <class T>
  static T* At(Arena& arena, int64_t chunk, int64_t chunk_bytes) {
    return reinterpret_cast<T*>(arena.data() + chunk * chunk_bytes);
  }

  Slot State(int64_t chunk, PlaneList planes, StateFormat format) const {
    const std::vector<std::unique_ptr<Arena>>& arenas = states_.at(format);
    const StoredPlanes stored = StoredPlanesOf(planes, format);
    Slot slot = {.format = format};
    for (size_t i = 0; i < stored.size(); ++i) {
      // A rule's planes have the first arenas, by their places; what is stored beside them the last.
      const size_t arena = i < planes.size() ? i : arenas.size() - (stored.size() - i);
      slot.planes[static_cast<int>(stored[i])] =
          At<void>(*arenas[arena], chunk, StoredBytes(format, stored[i], kMaxChunkElements));
    }
    return slot;
  }

  int64_t chunks_ = 0;
  std::unique_ptr<Arena> gradients_;
  std::unique_ptr<Arena> shards_;
  std::map<StateFormat, std::vector<std::unique_ptr<Arena>>> states_;
};

// Runs body(chunk) for all chunks, somehow.
using ForChunks = absl::FunctionRef<void(absl::FunctionRef<void(int64_t)>)>;

struct Times {
  std::vector<double> roofline;
  std::vector<double> kernel;
};

void MeasureRound(const Arrays& arrays, const BenchmarkedUpdate& update, int prefetch_ahead,
                  ForChunks for_chunks, Times& times) {
  // The two are measured one after the other in every round. What slows the host for a while slows
  // both, and hardly shows in their ratio.
  times.roofline.push_back(Seconds([&] {
    for_chunks([&](int64_t chunk) { MoveTraffic(arrays.Traffic(chunk, update), prefetch_ahead); });
  }));
  times.kernel.push_back(
      Seconds([&] { for_chunks([&](int64_t chunk) { arrays.Update(chunk, update); }); }));
}

// The distance with which the roofline is highest; the first where there is no time to try.
int BestPrefetch(const Arrays& arrays, const BenchmarkedUpdate& update, ForChunks for_chunks,
                 double seconds) {
  int best = kPrefetchAheadElements[0];
  double best_seconds = 0;
  double spent_seconds = 0;
  for (const int ahead : kPrefetchAheadElements) {
    for (int turn = 0; turn < 2; ++turn) {  // The first of all also warms up.
      const double taken = Seconds([&] {
        for_chunks([&](int64_t chunk) { MoveTraffic(arrays.Traffic(chunk, update), ahead); });
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

std::string NameOf(const BenchmarkedUpdate& update) {
  const HyperParameters& values = update.values;
  const bool has_momentum = values.rule == Rule::kSgd && values.momentum > 0;
  const bool is_packed = update.format != StateFormat::kFloat32;
  return absl::StrCat(TitleOf(values), has_momentum ? " momentum" : "", is_packed ? " " : "",
                      is_packed ? Name(update.format) : "");
}

KernelSpeed SpeedOf(const BenchmarkedUpdate& update, int threads, int64_t elements,
                    const Times& times) {
  std::vector<double> fractions;
  for (size_t round = 0; round < times.kernel.size(); ++round) {
    // Both moved the same elements, so the ratio of the times is that of the speeds.
    fractions.push_back(times.roofline[round] / times.kernel[round]);
  }
  const auto count = static_cast<double>(elements);
  return {.optimizer = NameOf(update),
          .bytes_per_element = TrafficPerElement(update),
          .threads = threads,
          .roofline_elements_per_second = count / Median(times.roofline),
          .kernel_elements_per_second = count / Median(times.kernel),
          .fraction = Median(std::move(fractions))};
}

std::string Row(const KernelSpeed& speed) {
  const auto column = [&](double elements_per_second) {
    return absl::StrFormat("%7.1f GB/s %7.3f Gparam/s",
                           elements_per_second * speed.bytes_per_element / 1e9,
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
  const std::vector<BenchmarkedUpdate>& updates = options.updates;
  std::set<StateFormat> formats;
  for (const BenchmarkedUpdate& update : updates) formats.insert(update.format);
  const int64_t chunk_bytes = Arrays::ChunkBytes(formats);
  const int64_t chunks = options.memory_bytes / chunk_bytes;
  if (chunks < 1) {
    return absl::InvalidArgumentError(absl::StrCat("the self-benchmark needs at least ",
                                                   chunk_bytes, " bytes of memory and has ",
                                                   options.memory_bytes));
  }
  TaskPool pool(options.threads, *options.topology);
  const std::unique_ptr<ArenaFactory> arenas = MakeAnonymousArenaFactory(&pool);
  BALLAST_ASSIGN_OR_RETURN(const Arrays arrays, Arrays::Create(chunks, formats, *arenas, pool));

  const auto with_all = [&](absl::FunctionRef<void(int64_t)> body) { pool.ForEach(chunks, body); };
  // The calling thread does all of it, in the same memory as the pool's threads.
  const auto with_one = [&](absl::FunctionRef<void(int64_t)> body) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
  };
  std::vector<Times> all(updates.size());
  std::vector<Times> one(updates.size());
  std::map<StateFormat, int> ahead;
  for (const BenchmarkedUpdate& update : updates) {
    if (ahead.contains(update.format)) continue;
    ahead[update.format] = BestPrefetch(arrays, update, with_all, options.seconds / formats.size());
  }
  double round_seconds = 0;
  int rounds = 0;
  // Another round begins only if one that takes as long as the last would end in time.
  while (rounds == 0 ||
         (rounds < kMaxRounds && SecondsSince(begin) + round_seconds < options.seconds)) {
    round_seconds = Seconds([&] {
      for (size_t i = 0; i < updates.size(); ++i) {
        const int best = ahead[updates[i].format];
        MeasureRound(arrays, updates[i], best, with_all, all[i]);
        MeasureRound(arrays, updates[i], best, with_one, one[i]);
      }
    });
    ++rounds;
  }

  SelfBenchmark result;
  result.kernel_target = KernelTarget();
  result.elements = chunks * kMaxChunkElements;
  result.rounds = rounds;
  for (size_t i = 0; i < updates.size(); ++i) {
    result.all_threads.push_back(SpeedOf(updates[i], pool.threads(), result.elements, all[i]));
    result.one_thread.push_back(SpeedOf(updates[i], 1, result.elements, one[i]));
  }
  // Arrays that fit in the last cache say nothing about memory.
  const int64_t cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  // sysconf says 0 where it does not know. Then all arrays count as large.
  const bool beyond_cache = chunks * Arrays::ChunkBytes({updates[0].format}) >= 2 * cache_bytes;
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
        "kernel: updates reach %.2f of what this host's memory allows; is another process busy, or "
        "are the processors the limit?",
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
