// Which elements of a parameter a member of a job has. A cut may leave regular gaps: some columns of
// a matrix are one run.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_ELEMENT_RUNS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_ELEMENT_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ballast {

// `count` pieces of `elements`. The first begins at `begin`, each other one `stride` behind the one
// before.
struct ElementRun {
  int64_t begin = 0;
  int64_t elements = 0;
  int64_t count = 1;
  int64_t stride = 0;

  bool operator==(const ElementRun&) const = default;
};

// In the parameter's row-major order.
class ElementRuns {
 public:
  ElementRuns() = default;
  // As they were written. False: no cut leaves such runs, or they have too many pieces.
  bool Read(absl::Span<const ElementRun> runs);

  // Behind all others.
  void Add(int64_t begin, int64_t elements);
  absl::Span<const ElementRun> runs() const { return runs_; }
  int64_t elements() const { return elements_; }

  // Calls visit(begin, elements) with what lies at [offset, offset + elements) of these elements,
  // one behind the other.
  template <class Visit>
  void VisitRange(int64_t offset, int64_t elements, Visit&& visit) const {
    for (const ElementRun& run : runs_) {
      const int64_t size = run.elements * run.count;
      for (; offset < size && elements > 0;) {
        const int64_t within = offset % run.elements;
        const int64_t some = std::min(elements, run.elements - within);
        visit(run.begin + offset / run.elements * run.stride + within, some);
        offset += some;
        elements -= some;
      }
      offset -= std::min(offset, size);
    }
  }

 private:
  std::vector<ElementRun> runs_;
  int64_t elements_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_ELEMENT_RUNS_H_
