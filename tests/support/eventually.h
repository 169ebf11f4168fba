// Waiting in a test for the work of another thread, with a limit.
#ifndef BALLAST_TESTS_SUPPORT_EVENTUALLY_H_
#define BALLAST_TESTS_SUPPORT_EVENTUALLY_H_

#include <chrono>
#include <thread>

namespace ballast {

// Whether `holds()` has become true within two minutes.
template <typename Condition>
bool Eventually(const Condition& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_EVENTUALLY_H_
