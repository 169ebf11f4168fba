// A process of a test that may map little more memory than it has.
#ifndef BALLAST_TESTS_SUPPORT_ADDRESS_LIMIT_H_
#define BALLAST_TESTS_SUPPORT_ADDRESS_LIMIT_H_

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>

namespace ballast {

// While it lives, this process has the addresses that it had, and `more_bytes`. Ends the process
// where the system does not take the limit. Little is not enough for a sanitizer, which maps
// terabytes later too.
class ScopedAddressLimit {
 public:
  explicit ScopedAddressLimit(int64_t more_bytes) {
    if (getrlimit(RLIMIT_AS, &before_) != 0) std::abort();
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(pages * getpagesize() + more_bytes);
    if (setrlimit(RLIMIT_AS, &limit) != 0) std::abort();
  }
  ~ScopedAddressLimit() {
    if (setrlimit(RLIMIT_AS, &before_) != 0) std::abort();
  }
  ScopedAddressLimit(const ScopedAddressLimit&) = delete;
  ScopedAddressLimit& operator=(const ScopedAddressLimit&) = delete;

 private:
  rlimit before_ = {};
};

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_ADDRESS_LIMIT_H_
