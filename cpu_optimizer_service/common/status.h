// Passing absl::Status on.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATUS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

// Returns from the enclosing function if `expression` is not OK.
#define BALLAST_RETURN_IF_ERROR(expression)                                 \
  do {                                                                      \
    if (absl::Status ballast_status_ = (expression); !ballast_status_.ok()) \
      return ballast_status_;                                               \
  } while (false)

// BALLAST_ASSIGN_OR_RETURN(auto value, Compute()): the value, or returns the error.
#define BALLAST_ASSIGN_OR_RETURN(declaration, expression)                                    \
  BALLAST_ASSIGN_OR_RETURN_IMPL_(BALLAST_CONCAT_(ballast_status_or_, __LINE__), declaration, \
                                 expression)
#define BALLAST_ASSIGN_OR_RETURN_IMPL_(name, declaration, expression) \
  auto name = (expression);                                           \
  if (!name.ok()) return std::move(name).status();                    \
  declaration = *std::move(name)
#define BALLAST_CONCAT_(a, b) BALLAST_CONCAT_IMPL_(a, b)
#define BALLAST_CONCAT_IMPL_(a, b) a##b

namespace ballast {

// The same error with `context` and ": " before its message. OK stays OK.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STATUS_H_
