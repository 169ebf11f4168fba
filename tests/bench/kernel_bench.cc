// How fast the update is: against the memory traffic that it cannot avoid, with every option, with
// denormal state, over one large tensor and thousands of small ones; the sums, the addition, and
// two ways to add the last of several micro-steps.
//
//   kernel_bench [--short] [--only-kernel] [--threads N] [--elements N] [--rounds N] [--json FILE]
//
// What is compared is measured in turns (A B A B ...), since machines drift; figures are medians.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "cpu_optimizer_service/kernels/roofline.h"
#include "tests/bench/figures.h"
#include "tests/bench/kernel_passes.h"

namespace ballast::bench {
namespace {

struct Arguments {
  bool brief = false;
  bool only_kernel = false;
  int64_t threads = 0;
  int64_t elements = 0;  // 0: what the mode says.
  int64_t rounds = 0;    // The same.
  std::string json_path;
};

struct Variant {
  std::string key;  // Of the figure, without the unit.
  std::function<void()> pass;
  std::function<void()> prepare;  // Before each pass, not timed; may be null.
  int64_t traffic_bytes = 0;      // For an element; 0: not stated.
};
struct Ratio {
  std::string key;
  size_t of = 0;  // The time of this variant...
  size_t to = 0;  // ...divided by that of this one, in the same round.
};
struct Series {
  std::string name;
  std::vector<Variant> variants;
  std::vector<Ratio> ratios;
  std::function<void()> begin;  // Before the first pass; may be null.
  // The variants take turns on each of so many parts of the model, and begin with another one each
  // time: for what differs by less than a host does from one moment to the next.
  int64_t slices = 1;
};

double Seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double RunOnce(const Variant& variant) {
  if (variant.prepare != nullptr) variant.prepare();
  return Seconds(variant.pass);
}

// Seconds of each variant over the whole model.
std::vector<double> RunRound(const Series& series, KernelPasses& passes) {
  const size_t count = series.variants.size();
  std::vector<double> seconds(count);
  for (int64_t slice = 0; slice < series.slices; ++slice) {
    passes.UseSlice(slice, series.slices);
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t v = (turn + static_cast<size_t>(slice)) % count;
      seconds[v] += RunOnce(series.variants[v]);
    }
  }
  passes.UseSlice(0, 1);
  return seconds;
}

// One iteration is one round over all variants.
void RunSeries(benchmark::State& state, const Series& series, KernelPasses& passes,
               Figures& figures) {
  const int64_t elements = passes.elements();
  if (series.begin != nullptr) series.begin();
  std::vector<std::vector<double>> seconds(series.variants.size());
  for (const Variant& variant : series.variants) RunOnce(variant);  // Warms up.
  for (auto _ : state) {
    const std::vector<double> round = RunRound(series, passes);
    for (size_t v = 0; v < round.size(); ++v) seconds[v].push_back(round[v]);
    state.SetIterationTime(std::accumulate(round.begin(), round.end(), 0.0));
  }
  for (size_t v = 0; v < series.variants.size(); ++v) {
    const Variant& variant = series.variants[v];
    std::vector<double> gparam_s, gb_s;
    for (const double taken : seconds[v]) {
      gparam_s.push_back(static_cast<double>(elements) / taken / 1e9);
      gb_s.push_back(gparam_s.back() * static_cast<double>(variant.traffic_bytes));
    }
    figures.Add(absl::StrCat(variant.key, "_gparam_s"), gparam_s, "Gparam/s");
    state.counters[variant.key] = Median(gparam_s);
    if (variant.traffic_bytes > 0) figures.Add(absl::StrCat(variant.key, "_gb_s"), gb_s, "GB/s");
  }
  for (const Ratio& ratio : series.ratios) {
    std::vector<double> values;
    for (size_t round = 0; round < seconds[ratio.of].size(); ++round) {
      values.push_back(seconds[ratio.of][round] / seconds[ratio.to][round]);
    }
    figures.Add(ratio.key, values, "");
    state.counters[ratio.key] = Median(values);
  }
}

// The distance with which the roofline is highest on this host, with one thread or all.
int BestPrefetch(KernelPasses& passes, bool one_thread) {
  constexpr int kTurns = 3;
  passes.UseOneThread(one_thread);
  std::vector<double> seconds[std::size(kPrefetchAheadElements)];
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t i = 0; i < std::size(seconds); ++i) {
      seconds[i].push_back(Seconds([&] { passes.Roofline(kPrefetchAheadElements[i]); }));
    }
  }
  passes.UseOneThread(false);
  size_t best = 0;
  for (size_t i = 1; i < std::size(seconds); ++i) {
    if (Median(seconds[i]) < Median(seconds[best])) best = i;
  }
  return kPrefetchAheadElements[best];
}

Series AgainstRoofline(KernelPasses& passes, bool one_thread, int prefetch_ahead) {
  const std::string suffix = one_thread ? "_one_thread" : "_all_threads";
  Series series{.name = absl::StrCat("roofline_and_kernel", suffix),
                .variants = {{.key = absl::StrCat("roofline", suffix),
                              .pass = [&, prefetch_ahead] { passes.Roofline(prefetch_ahead); },
                              .traffic_bytes = kAdamTrafficBytesPerElement},
                             {.key = absl::StrCat("kernel", suffix),
                              .pass = [&] { passes.Update({}); },
                              .traffic_bytes = kAdamTrafficBytesPerElement}},
                .ratios = {{.key = absl::StrCat("kernel_to_roofline", suffix), .of = 0, .to = 1}}};
  series.begin = [&passes, one_thread] {
    passes.UseOneThread(one_thread);
    passes.Fill(DType::kBFloat16, /*denormal=*/false);
  };
  return series;
}

Series Tensors(KernelPasses& passes, const std::vector<int>& counts) {
  // Parts of some 8M elements, too many for the caches.
  Series series{.name = "tensors",
                .slices = std::max<int64_t>(1, passes.elements() / (int64_t{8} << 20))};
  for (const int count : counts) {
    auto layout = std::make_shared<const Layout>(passes.LayoutOf(count));
    series.variants.push_back({.key = absl::StrCat("tensors_", count),
                               .pass = [&passes, layout] { passes.ThroughStore(*layout); },
                               .traffic_bytes = kAdamTrafficBytesPerElement});
    const size_t index = series.variants.size() - 1;
    if (index == 0) continue;
    series.ratios.push_back(
        {.key = absl::StrCat("tensors_", count, "_ratio"), .of = index, .to = 0});
  }
  series.begin = [&passes] { passes.Fill(DType::kBFloat16, /*denormal=*/false); };
  return series;
}

Series Denormals(KernelPasses& passes) {
  const auto variant = [&](const char* key, bool denormal) {
    return Variant{.key = key,
                   .pass = [&passes] { passes.Update({}); },
                   .prepare = [&passes, denormal] { passes.Fill(DType::kBFloat16, denormal); },
                   .traffic_bytes = kAdamTrafficBytesPerElement};
  };
  return {.name = "denormals",
          .variants = {variant("normal_state", false), variant("denormal_state", true)},
          .ratios = {{.key = "denormals_ratio", .of = 1, .to = 0}}};
}

// Each option alone, beside what is usual.
std::vector<Series> EachOption(KernelPasses& passes) {
  using Options = KernelPasses::Options;
  const auto series_of = [&](DType gradient, std::vector<std::pair<std::string, Options>> options) {
    Series series{.name = absl::StrCat("options_of_", Name(gradient), "_gradients")};
    for (auto& [name, each] : options) {
      each.gradient = gradient;
      series.variants.push_back({.key = absl::StrCat("kernel_", name),
                                 .pass = [&passes, each = each] { passes.Update(each); },
                                 .traffic_bytes = KernelPasses::TrafficBytes(each)});
    }
    series.begin = [&passes, gradient] { passes.Fill(gradient, /*denormal=*/false); };
    return series;
  };
  return {series_of(DType::kBFloat16, {{"decay_decoupled", {}},
                                       {"decay_none", {.decay = WeightDecay::kNone}},
                                       {"decay_l2", {.decay = WeightDecay::kL2}},
                                       {"amsgrad", {.amsgrad = true}},
                                       {"shard_fp16", {.shard = DType::kFloat16}},
                                       {"shard_fp32", {.shard = DType::kFloat32}},
                                       {"shard_none", {.has_shard = false}}}),
          series_of(DType::kFloat16, {{"gradient_fp16", {}}}),
          series_of(DType::kFloat32, {{"gradient_fp32", {}}})};
}

std::vector<Series> SumsAndAddition(KernelPasses& passes) {
  const auto fill = [&passes](DType dtype) {
    return [&passes, dtype] { passes.Fill(dtype, /*denormal=*/false); };
  };
  return {{.name = "sums_of_bf16",
           .variants = {{.key = "sums",
                         .pass = [&] { passes.Sums(DType::kBFloat16); },
                         .traffic_bytes = 2}},
           .begin = fill(DType::kBFloat16)},
          {.name = "sums_of_fp32_and_addition",
           .variants = {{.key = "sums_fp32",
                         .pass = [&] { passes.Sums(DType::kFloat32); },
                         .traffic_bytes = 4},
                        {.key = "add", .pass = [&] { passes.Add(); }, .traffic_bytes = 10}},
           .begin = fill(DType::kFloat32)}};
}

// The last of several micro-steps: added when it arrives, or kept apart and added by the update.
Series MicroSteps(KernelPasses& passes) {
  const auto fill = [&passes] { passes.Fill(DType::kFloat32, /*denormal=*/false); };
  return {.name = "last_micro_step",
          .variants = {{.key = "last_added_on_arrival", .pass = [&] { passes.ArriveAdded(); }},
                       {.key = "last_added_update", .pass = [&] { passes.UpdateAdded(); }},
                       {.key = "last_apart_on_arrival", .pass = [&] { passes.ArriveApart(); }},
                       {.key = "last_apart_update", .pass = [&] { passes.UpdateApart(); }}},
          .ratios = {{.key = "last_apart_to_added_on_arrival", .of = 2, .to = 0},
                     {.key = "last_apart_to_added_update", .of = 3, .to = 1}},
          .begin = fill};
}

std::vector<Series> AllSeries(KernelPasses& passes, const Arguments& arguments,
                              int prefetch_ahead_all, int prefetch_ahead_one) {
  std::vector<Series> all;
  all.push_back(AgainstRoofline(passes, /*one_thread=*/false, prefetch_ahead_all));
  if (arguments.only_kernel) {
    all[0].variants.erase(all[0].variants.begin());
    all[0].ratios.clear();
    // What a step's bound is made of: the pass of the norm, too, with the update in turn.
    all[0].variants.push_back(
        {.key = "sums", .pass = [&] { passes.Sums(DType::kBFloat16); }, .traffic_bytes = 2});
    return all;
  }
  all.push_back(AgainstRoofline(passes, /*one_thread=*/true, prefetch_ahead_one));
  all.push_back(Denormals(passes));
  all.back().begin = [&passes] { passes.UseOneThread(false); };
  all.push_back(Tensors(passes, {1, 100, 3000, 100000}));
  for (Series& series : EachOption(passes)) all.push_back(std::move(series));
  for (Series& series : SumsAndAddition(passes)) all.push_back(std::move(series));
  all.push_back(MicroSteps(passes));
  return all;
}

absl::Status Run(const Arguments& arguments) {
  const int64_t wanted = arguments.elements > 0 ? arguments.elements
                         : arguments.brief      ? 32'000'000
                                                : 100'000'000;
  const int64_t chunks = (wanted + kMaxChunkElements - 1) / kMaxChunkElements;
  const int64_t rounds = arguments.rounds > 0    ? arguments.rounds
                         : arguments.only_kernel ? 15
                         : arguments.brief       ? 7
                                                 : 15;
  BALLAST_ASSIGN_OR_RETURN(const std::unique_ptr<KernelPasses> passes,
                           KernelPasses::Create(chunks, static_cast<int>(arguments.threads)));
  if (!arguments.only_kernel) BALLAST_RETURN_IF_ERROR(passes->AddAmsgradPlane());

  Figures figures("kernel_bench");
  const int prefetch_all = arguments.only_kernel ? 0 : BestPrefetch(*passes, false);
  const int prefetch_one = arguments.only_kernel ? 0 : BestPrefetch(*passes, true);
  figures.info() = {{"threads", passes->pool().threads()},
                    {"nodes", passes->pool().nodes()},
                    {"elements", passes->elements()},
                    {"rounds", rounds},
                    {"kernel_target", KernelTarget()},
                    {"roofline_prefetch_ahead_elements", prefetch_all},
                    {"roofline_prefetch_ahead_elements_one_thread", prefetch_one}};
  const std::vector<Series> all = AllSeries(*passes, arguments, prefetch_all, prefetch_one);
  for (const Series& series : all) {
    benchmark::RegisterBenchmark(
        series.name.c_str(),
        [&](benchmark::State& state) { RunSeries(state, series, *passes, figures); })
        ->Iterations(rounds)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return arguments.json_path.empty() ? absl::OkStatus() : figures.Write(arguments.json_path);
}

// What Google Benchmark has left.
absl::StatusOr<Arguments> Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    const auto value = [&](absl::string_view name, absl::string_view& text) {
      if (argument == name && i + 1 < argc) {
        text = argv[++i];
        return true;
      }
      text = argument;
      return absl::ConsumePrefix(&text, name) && absl::ConsumePrefix(&text, "=");
    };
    const auto number = [](absl::string_view text, int64_t most, int64_t& to) {
      return absl::SimpleAtoi(text, &to) && to >= 1 && to <= most;
    };
    absl::string_view text;
    bool good = true;
    if (argument == "--short") {
      arguments.brief = true;
    } else if (argument == "--only-kernel") {
      arguments.only_kernel = true;
    } else if (value("--json", text)) {
      arguments.json_path = std::string(text);
    } else if (value("--threads", text)) {
      good = number(text, 4096, arguments.threads);
    } else if (value("--elements", text)) {
      good = number(text, int64_t{1} << 34, arguments.elements);
    } else if (value("--rounds", text)) {
      good = number(text, 1000, arguments.rounds);
    } else {
      good = false;
    }
    if (!good) return absl::InvalidArgumentError(absl::StrCat("bad argument '", argv[i], "'"));
  }
  return arguments;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const auto arguments = ballast::bench::Parse(argc, argv);
  const absl::Status status = arguments.ok() ? ballast::bench::Run(*arguments) : arguments.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "kernel_bench: %s\n", std::string(status.message()).c_str());
  return arguments.ok() ? 1 : 2;
}
