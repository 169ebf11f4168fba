// Waiting in a test for the work of another thread, with a limit.
#ifndef BALLAST_TESTS_CLIENT_EVENTUALLY_H_
#define BALLAST_TESTS_CLIENT_EVENTUALLY_H_

#include <chrono>
#include <thread>

namespace ballast::client {

// Whether `holds()` has become true within half a minute.
template <typename Condition>
bool Eventually(const Condition& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_EVENTUALLY_H_
