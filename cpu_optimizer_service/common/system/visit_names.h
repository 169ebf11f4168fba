// What a directory has in it. Not by std::filesystem's iterators: where they have no memory, libstdc++
// ends the process.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VISIT_NAMES_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VISIT_NAMES_H_

#include <dirent.h>
#include <fcntl.h>

#include <cerrno>
#include <memory>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast {

// Calls visit(name, number) with each name in `directory`, which is relative to the directory that
// is open as `parent`; `number` is the directory itself, open. `flags`: more for openat. Returns 0, or
// the errno of a failure.
template <typename Visit>
int VisitNames(int parent, const char* directory, Visit&& visit, int flags = 0) {
  FileDescriptor file(openat(parent, directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags));
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(file ? fdopendir(file.number()) : nullptr,
                                                    closedir);
  if (entries == nullptr) return errno;
  const int number = file.Release();  // Closed with `entries`.
  while (true) {
    errno = 0;
    const dirent* const entry = readdir(entries.get());
    if (entry == nullptr) return errno;
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") visit(entry->d_name, number);
  }
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_VISIT_NAMES_H_
