#include "cpu_optimizer_service/state/element_runs.h"

namespace ballast {
namespace {

// What every program counts exactly (RFC 8259, section 6).
constexpr int64_t kMostElements = int64_t{1} << 53;
// Of one parameter in a file. Those who read go through them one by one.
constexpr int64_t kMostPieces = int64_t{1} << 24;

}  // namespace

bool ElementRuns::Read(absl::Span<const ElementRun> runs) {
  runs_.clear();
  elements_ = 0;
  int64_t pieces = 0;
  for (const ElementRun& run : runs) {
    if (run.begin < 0 || run.begin > kMostElements || run.elements < 1 || run.count < 1 ||
        run.count > kMostPieces || run.elements > (kMostElements - elements_) / run.count ||
        run.stride < 0 || run.stride > kMostElements / run.count) {
      return false;
    }
    pieces += run.count;
    elements_ += run.count * run.elements;
    runs_.push_back(run);
  }
  return pieces <= kMostPieces;
}

void ElementRuns::Add(int64_t begin, int64_t elements) {
  elements_ += elements;
  if (!runs_.empty()) {
    ElementRun& last = runs_.back();
    if (last.count == 1 && begin == last.begin + last.elements) {
      last.elements += elements;
      return;
    }
    const bool repeats = elements == last.elements &&
                         (last.count == 1 || begin == last.begin + last.count * last.stride);
    if (repeats) {
      last.stride = begin - last.begin - (last.count - 1) * last.stride;
      ++last.count;
      return;
    }
  }
  runs_.push_back({.begin = begin, .elements = elements});
}

}  // namespace ballast
