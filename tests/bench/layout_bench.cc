// The largest job that a description is meant for: how long the description is, and what one rank's
// layout takes of time and memory.
//
//   layout_bench [--short] [--json FILE]
#include <malloc.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "tests/bench/figures.h"

namespace ballast::bench {
namespace {

// Experts and their layers: at full length 1e12 parameters in 100,000 tensors.
JobSpec Spec(int64_t tensors) {
  JobSpec spec;
  spec.name = "largest";
  spec.groups = {{.name = "all"}};
  spec.layout.world_size = 4096;
  spec.layout.mesh = {{"dp", 512}, {"tp", 8}};
  for (int64_t t = 0; t < tensors; ++t) {
    spec.layout.parameters.push_back(
        {.name = absl::StrCat("model.layers.", t / 1000, ".mlp.experts.", t % 1000,
                              ".gate_proj.weight"),
         .shape = {3200, 3125},
         .placements = {{.shard_dim = 0}, {.shard_dim = 1}}});
  }
  return spec;
}

double HeapMb() { return static_cast<double>(mallinfo2().uordblks + mallinfo2().hblkhd) / 1e6; }

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
      return absl::InvalidArgumentError(absl::StrCat(
          "unknown argument '", word, "'; usage: layout_bench [--short] [--json FILE]"));
    }
  }
  const int64_t tensors = brief ? 1000 : 100'000;
  Figures figures("layout");
  const double description_mb =
      static_cast<double>(proto::ToProto(Spec(tensors)).ByteSizeLong()) / 1e6;
  std::vector<double> seconds, megabytes;
  for (int rank = 0; rank < 4096; rank += 1365) {
    const double before = HeapMb();
    LayoutSpec spec = Spec(tensors).layout;
    const auto begin = std::chrono::steady_clock::now();
    BALLAST_ASSIGN_OR_RETURN(const Layout layout, Layout::CreateForRank(std::move(spec), rank));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    seconds.push_back(took.count());
    megabytes.push_back(HeapMb() - before);
  }
  figures.Add("description_mb", {description_mb}, "MB");
  figures.Add("one_rank_s", seconds, "s");
  figures.Add("one_rank_mb", megabytes, "MB");
  figures.info()["tensors"] = tensors;
  absl::PrintF(
      "%d tensors on 4096 ranks: described in %.2f MB; one rank lays out in %.3f s, %.1f MB\n",
      tensors, description_mb, Median(seconds), Median(megabytes));
  return json_path.empty() ? absl::OkStatus() : figures.Write(json_path);
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  const absl::Status status = ballast::bench::Run(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "layout_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
