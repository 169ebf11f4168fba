// SHA-256 over pieces, from OpenSSL. std::bad_alloc if it has no memory.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_SHA256_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_SHA256_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

struct evp_md_ctx_st;

namespace ballast {

class Sha256 {
 public:
  Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(absl::Span<const std::byte> bytes);
  void Add(absl::string_view text);
  template <typename T>
  void AddValue(const T& value) {
    Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&value), sizeof(value)));
  }
  std::string Hex();  // Once, at the end.

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  const std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_SHA256_H_
