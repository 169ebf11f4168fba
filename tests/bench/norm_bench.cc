// What the edges of chunks and shards leave of the norm for the decision, while all ranks wait: the
// blocks and spans that they cut, summed from gradients that are there. No gradients are sent; of
// what is cut, each chunk's lies in the same memory.
//
//   norm_bench [--short] [--json FILE]
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/gradients/square_sums.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "tests/bench/figures.h"

namespace ballast::bench {
namespace {

// Parameters of one shape, sharded over ranks along one dimension.
struct Case {
  std::string name;
  int64_t parameters = 0;
  std::vector<int64_t> shape;
  int ranks = 1;
  int shard_dim = 0;
};

LayoutSpec Spec(const Case& of) {
  LayoutSpec spec;
  spec.world_size = of.ranks;
  spec.mesh = {{"shard", of.ranks}};
  for (int64_t p = 0; p < of.parameters; ++p) {
    spec.parameters.push_back({.name = absl::StrCat("p", p),
                               .shape = of.shape,
                               .placements = {{.shard_dim = of.shard_dim}}});
  }
  return spec;
}

absl::Status Measure(const Case& of, int rounds, TaskPool& pool, Figures& figures) {
  BALLAST_ASSIGN_OR_RETURN(const Layout layout, Layout::Create(Spec(of)));
  SquareSums sums(layout);
  const std::vector<uint16_t> gradient(kMaxChunkElements, 0x3f80);  // Ones.
  std::vector<double> samples;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    sums.Combine(
        [&](int) {
          return GradientView{gradient.data(), DType::kBFloat16};
        },
        [&](int64_t count, absl::FunctionRef<void(int64_t)> body) { pool.ForEach(count, body); });
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    samples.push_back(took.count());
  }
  figures.Add(absl::StrCat(of.name, "_ms"), samples, "ms");
  figures.info()[of.name] = {{"elements", layout.total_flat_elements()},
                             {"cut_blocks", sums.blocks().cut_blocks().size()},
                             {"cut_spans", sums.blocks().cut_spans().size()}};
  absl::PrintF("%-22s %8.2f ms   %d elements, %d blocks and %d spans cut\n", of.name,
               Median(samples), layout.total_flat_elements(), sums.blocks().cut_blocks().size(),
               sums.blocks().cut_spans().size());
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  bool brief = false;
  std::string json_path;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view word = argv[i];
    if (word == "--short") {
      brief = true;
    } else if (word == "--json" && i + 1 < argc) {
      json_path = argv[++i];
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown argument '", word, "'; usage: norm_bench [--short] [--json FILE]"));
    }
  }
  const int64_t scale = brief ? 1 : 10;
  const int rounds = brief ? 5 : 15;
  TaskPool pool(0);
  Figures figures("norm");
  const std::vector<Case> cases = {
      // At full length 10,000 shards, and 1e9 parameters of which every span is cut.
      {.name = "cut_pieces",
       .parameters = 500 * scale,
       .shape = {20001, 5},
       .ranks = 2,
       .shard_dim = 0},
      {.name = "columns",
       .parameters = 6 * scale,
       .shape = {4096, 4096},
       .ranks = 4,
       .shard_dim = 1},
      // No width that is a multiple of a block's: every block is cut.
      {.name = "columns_within_blocks",
       .parameters = scale,
       .shape = {4096, 4000},
       .ranks = 4,
       .shard_dim = 1}};
  for (const Case& of : cases) BALLAST_RETURN_IF_ERROR(Measure(of, rounds, pool, figures));
  return json_path.empty() ? absl::OkStatus() : figures.Write(json_path);
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  const absl::Status status = ballast::bench::Run(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "norm_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
