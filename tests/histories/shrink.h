// Makes a failing history smaller.
#ifndef BALLAST_TESTS_HISTORIES_SHRINK_H_
#define BALLAST_TESTS_HISTORIES_SHRINK_H_

#include <chrono>
#include <functional>

#include "tests/histories/history.h"

namespace ballast::histories {

struct ShrinkLimits {
  int runs = 1500;
  std::chrono::seconds time{60};
};

// Takes away attempts, events, parameters, ranks and settings, one at a time, as long as `fails`
// says that what is left fails still.
History Shrink(History history, const std::function<bool(const History&)>& fails,
               const ShrinkLimits& limits = {});

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_SHRINK_H_
