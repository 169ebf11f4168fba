#include "cpu_optimizer_service/host/file_keeper.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

absl::StatusOr<FileDescriptor> MakeSealedFile(const std::string& name, int64_t bytes) {
  const auto no_room = [&](const char* call) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes,
                                                     " bytes of named memory for ", name, ": ",
                                                     call, ": ", std::strerror(errno)));
  };
  FileDescriptor file(memfd_create("ballast", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return no_room("memfd_create");
  // This sets the size alone. NamedMemory gives the file its pages.
  if (ftruncate(file.number(), bytes) != 0) return no_room("ftruncate");
  // From here on nobody can change the size. A worker that could cut the file short would end this
  // process by SIGBUS when it touches a page that is gone. F_SEAL_SEAL: nor can a worker add a seal
  // against writing.
  if (fcntl(file.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return no_room("sealing");
  }
  return file;
}

std::string FileKeeper::WhatIs(const std::string& name) const {
  return absl::StrCat("the memory named ", name);
}

}  // namespace ballast
