#include "cpu_optimizer_service/gradients/part_sums.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

struct CutBlock {
  alignas(64) float elements[kBlockElements] = {};
  std::bitset<kBlockElements> sent;
};

// By (parameter, first element).
using CutBlocks = std::map<std::pair<int, int64_t>, CutBlock>;

absl::Status AddRun(const Layout& layout, const CutRun& run, CutBlocks& blocks) {
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("elements [", run.begin, ", ",
                                                   run.begin + run.values.size(), ") of parameter ",
                                                   run.parameter, " ", why));
  };
  const auto count = static_cast<int64_t>(run.values.size());
  const bool exists = run.parameter >= 0 &&
                      run.parameter < static_cast<int>(layout.spec().parameters.size()) &&
                      layout.spec().parameters[run.parameter].trainable;
  if (!exists || run.begin < 0 || count > layout.place(run.parameter).elements - run.begin) {
    return wrong("do not exist");
  }
  const int64_t in_block = run.begin % kBlockElements;
  if (in_block + count > kBlockElements) return wrong("lie in several blocks");
  CutBlock& block = blocks[{run.parameter, run.begin - in_block}];
  for (int64_t i = 0; i < count; ++i) {
    if (block.sent.test(in_block + i)) return wrong("were sent twice");
    block.sent.set(in_block + i);
    block.elements[in_block + i] = run.values[i];
  }
  return absl::OkStatus();
}

}  // namespace

bool PartSums::finite() const {
  return std::ranges::all_of(groups, [](const ExactSum& sum) { return sum.finite(); }) &&
         std::ranges::all_of(cut, [](const CutRun& run) {
           return std::ranges::all_of(run.values, [](float value) { return std::isfinite(value); });
         });
}

absl::StatusOr<std::vector<double>> GroupSums(const Layout& layout,
                                              absl::Span<const PartSums* const> parts) {
  std::vector<ExactSum> groups(layout.group_count());
  CutBlocks blocks;
  for (const PartSums* const part : parts) {
    if (part->groups.size() != groups.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("sums of ", part->groups.size(), " groups of ", groups.size()));
    }
    for (size_t group = 0; group < groups.size(); ++group) groups[group].Add(part->groups[group]);
    for (const CutRun& run : part->cut) BALLAST_RETURN_IF_ERROR(AddRun(layout, run, blocks));
  }
  for (const auto& [place, block] : blocks) {
    const auto [parameter, begin] = place;
    const int64_t elements = std::min(kBlockElements, layout.place(parameter).elements - begin);
    if (static_cast<int64_t>(block.sent.count()) != elements) {
      return absl::InvalidArgumentError(absl::StrCat(
          "of elements [", begin, ", ", begin + elements, ") of parameter ", parameter, " only ",
          block.sent.count(), " were sent"));
    }
    double sum = 0;
    BlockSumsOfSquares(block.elements, DType::kFloat32, {&sum, 1});
    groups[layout.spec().parameters[parameter].group].Add(sum);
  }
  return Rounded(groups);
}

}  // namespace ballast
