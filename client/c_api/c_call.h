// What every function of client/ballast.h does around its work: no exception leaves it, the thread
// keeps the message.
#ifndef BALLAST_CLIENT_C_API_C_CALL_H_
#define BALLAST_CLIENT_C_API_C_CALL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ballast::client {

// The calling thread's; "" while no call has failed.
std::string& CMessage();

// Runs `work`, which returns an absl::Status; returns its code and keeps its message.
template <class Work>
int32_t CCall(Work&& work) noexcept {
  absl::Status status;
  try {
    try {
      status = work();
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory");
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    } catch (...) {
      status = absl::InternalError("an unknown exception");
    }
    if (!status.ok()) CMessage() = std::string(status.message());
  } catch (...) {  // No memory for the message.
  }
  return static_cast<int32_t>(status.code());
}

// A structure of the caller's as this library knows it: zero where the caller's is older and shorter.
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

// Writes as much of `value` as the caller's structure takes; its size stays.
template <class T>
void CWrite(T value, T* out) {
  value.size = out->size;
  std::memcpy(out, &value, std::min(out->size, sizeof(T)));
}

// Writes element `index` of an array of such structures, each as long as the first one says.
template <class T>
void CWriteAt(T value, T* first, size_t index) {
  value.size = first->size;
  std::memcpy(reinterpret_cast<char*>(first) + index * first->size, &value,
              std::min(value.size, sizeof(T)));
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
