// Large, zeroed memory for state and gradients. It is an interface, so that files on tmpfs can
// replace anonymous memory.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_ARENA_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/host/task_pool.h"

namespace ballast {

// One mapping, unmapped on destruction. Handed-out pieces are 64-byte aligned.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual std::byte* data() = 0;
  virtual int64_t size_bytes() const = 0;
};

class ArenaFactory {
 public:
  virtual ~ArenaFactory() = default;
  enum class Touch : uint8_t {
    kNow,    // The pages exist when Create returns, so that an update never waits for them.
    kLater,  // Each page comes with its first write.
  };
  // Zeroed. RESOURCE_EXHAUSTED if the system refuses the mapping. `label` names it: "job gpt2
  // state".
  virtual absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                        Touch touch) = 0;
};

// Anonymous memory in huge pages, if the system gives them. `tasks`, which outlives the factory,
// touches it: in an arena of S bytes, byte b on node NodeOf(b, S). So an arena with chunks in order
// lies where ForEach over the chunks uses it. Null: the caller touches it. `warn` gets a line,
// once, if large memory is not in huge pages.
std::unique_ptr<ArenaFactory> MakeAnonymousArenaFactory(
    TaskPool* tasks = nullptr, std::function<void(const std::string&)> warn = nullptr);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_ARENA_H_
