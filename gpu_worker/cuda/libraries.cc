#include "gpu_worker/cuda/libraries.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

#define BALLAST_TO_STRING_IMPL(text) #text
#define BALLAST_TO_STRING(text) BALLAST_TO_STRING_IMPL(text)
// With the major version of the headers, because functions of another one may have other
// parameters.
constexpr char kCublasLtName[] = "libcublasLt.so." BALLAST_TO_STRING(CUBLAS_VER_MAJOR);
constexpr char kNcclName[] = "libnccl.so." BALLAST_TO_STRING(NCCL_MAJOR);

class Library {
 public:
  static absl::StatusOr<Library> Open(const std::string& name) {
    std::vector<std::string> paths = {name};
    if (const char* home = std::getenv("CUDA_HOME"); home != nullptr && *home != '\0') {
      paths.push_back(absl::StrCat(home, "/lib64/", name));
    }
    paths.push_back(absl::StrCat("/usr/local/cuda/lib64/", name));
    std::string reason;
    for (const std::string& path : paths) {
      // RTLD_NOW: a library that lacks something fails here, and not at a first call in the middle
      // of a step. RTLD_LOCAL: no other library is bound to these symbols.
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return Library(handle, name);
      const std::string why = dlerror();
      // A file that is there and does not load says more than paths where there is none.
      if (reason.empty() || !absl::StrContains(why, "cannot open shared object file")) reason = why;
    }
    return absl::FailedPreconditionError(
        absl::StrCat(name, " cannot be loaded (", reason,
                     "); install it, and put its folder into LD_LIBRARY_PATH"));
  }

  // Sets `function`, whose type the symbol has.
  template <typename Function>
  absl::Status Find(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(handle_, symbol));
    if (function != nullptr) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(name_, " has no ", symbol, "; install a newer one"));
  }

 private:
  Library(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* handle_;
  std::string name_;
};

// Sets `functions.name` to the symbol of the library whose name is `prefix` and then `name`.
#define BALLAST_FIND(prefix, name) \
  BALLAST_RETURN_IF_ERROR(library.Find(#prefix #name, functions.name))

absl::StatusOr<CublasLt> FindCublasLt() {
  BALLAST_ASSIGN_OR_RETURN(const Library library, Library::Open(kCublasLtName));
  CublasLt functions = {};
  BALLAST_FIND(cublasLt, Create);
  BALLAST_FIND(cublasLt, Destroy);
  BALLAST_FIND(cublasLt, Matmul);
  BALLAST_FIND(cublasLt, MatmulAlgoCheck);
  BALLAST_FIND(cublasLt, MatmulAlgoGetHeuristic);
  BALLAST_FIND(cublasLt, MatmulDescCreate);
  BALLAST_FIND(cublasLt, MatmulDescDestroy);
  BALLAST_FIND(cublasLt, MatmulDescSetAttribute);
  BALLAST_FIND(cublasLt, MatmulPreferenceCreate);
  BALLAST_FIND(cublasLt, MatmulPreferenceDestroy);
  BALLAST_FIND(cublasLt, MatmulPreferenceSetAttribute);
  BALLAST_FIND(cublasLt, MatrixLayoutCreate);
  BALLAST_FIND(cublasLt, MatrixLayoutDestroy);
  BALLAST_FIND(cublasLt, GetStatusString);
  return functions;
}

absl::StatusOr<Nccl> FindNccl() {
  BALLAST_ASSIGN_OR_RETURN(const Library library, Library::Open(kNcclName));
  Nccl functions = {};
  BALLAST_FIND(nccl, GetUniqueId);
  BALLAST_FIND(nccl, CommInitRankConfig);
  BALLAST_FIND(nccl, CommGetAsyncError);
  BALLAST_FIND(nccl, CommFinalize);
  BALLAST_FIND(nccl, CommDestroy);
  BALLAST_FIND(nccl, CommAbort);
  BALLAST_FIND(nccl, ReduceScatter);
  BALLAST_FIND(nccl, AllGather);
  BALLAST_FIND(nccl, GetErrorString);
  BALLAST_FIND(nccl, GetLastError);
  return functions;
}

// The functions, or why there are none, of the first attempt.
template <typename Functions>
absl::StatusOr<const Functions*> Loaded(const absl::StatusOr<Functions>& functions) {
  if (!functions.ok()) return functions.status();
  return &*functions;
}

}  // namespace

absl::StatusOr<const CublasLt*> LoadCublasLt() {
  // Never destroyed: a thread may still use it when the process ends.
  static const absl::StatusOr<CublasLt>& functions = *new absl::StatusOr<CublasLt>(FindCublasLt());
  return Loaded(functions);
}

absl::StatusOr<const Nccl*> LoadNccl() {
  static const absl::StatusOr<Nccl>& functions = *new absl::StatusOr<Nccl>(FindNccl());
  return Loaded(functions);
}

}  // namespace ballast::worker
