// The frame of every function in client/ballast.h: it lets no exception out, and keeps message and
// reason for the thread.
#ifndef BALLAST_CLIENT_C_API_C_CALL_H_
#define BALLAST_CLIENT_C_API_C_CALL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"

namespace ballast::client {

// The calling thread's ballast_message and ballast_reason.
struct CSaid {
  std::string message;
  std::string reason;
};
CSaid& Said();

// Runs `work`, which returns an absl::Status; returns its code and keeps its message and reason.
template <class Work>
int32_t CCall(Work&& work) noexcept {
  absl::Status status;
  try {
    status = work();
  } catch (const std::exception& error) {  // Nothing in C could catch it.
    status = absl::InternalError(error.what());
  }
  if (!status.ok()) Said() = {std::string(status.message()), ReasonOf(status)};
  return static_cast<int32_t>(status.code());
}

// A caller's structure in this library's form: zero for fields that an older, shorter structure
// lacks.
template <class T>
T CRead(const T* given) {
  T read = {};
  std::memcpy(&read, given, std::min(given->size, sizeof(T)));
  return read;
}

// Element `index` of an array of such structures.
template <class T>
T CReadAt(const T* first, size_t index) {
  return CRead(
      reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) + index * first->size));
}

// Writes as much of `value` as fits into the caller's structure; its size does not change.
template <class T>
void CWrite(T value, T* out) {
  value.size = out->size;
  std::memcpy(out, &value, std::min(out->size, sizeof(T)));
}

// INVALID_ARGUMENT if the pointer is null.
template <class T>
absl::Status CheckGiven(const T* pointer, const char* name) {
  if (pointer != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is null"));
}

// The same for a structure, and if its size is not set.
template <class T>
absl::Status CheckStructure(const T* given, const char* name) {
  if (absl::Status status = CheckGiven(given, name); !status.ok()) return status;
  if (given->size >= sizeof(size_t) && given->size <= (size_t{1} << 16)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ".size is ", given->size, "; set it to sizeof(", name, ")"));
}

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_C_API_C_CALL_H_
