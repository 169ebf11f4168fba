// The names in cuda/libraries.h, in the libraries of this machine, which need no GPU to be loaded.
#include "gpu_worker/cuda/libraries.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace ballast::worker {
namespace {

TEST(CudaLibraries, HaveWhatIsAskedOfThem) {
  if (const auto library = LoadCublasLt(); library.ok()) {
    EXPECT_STREQ((*library)->GetStatusString(CUBLAS_STATUS_SUCCESS), "success");
  } else {
    EXPECT_THAT(std::string(library.status().message()), testing::HasSubstr("LD_LIBRARY_PATH"));
  }
  if (const auto library = LoadNccl(); library.ok()) {
    EXPECT_STREQ((*library)->GetErrorString(ncclSuccess), "no error");
  } else {
    EXPECT_THAT(std::string(library.status().message()), testing::HasSubstr("LD_LIBRARY_PATH"));
  }
}

}  // namespace
}  // namespace ballast::worker
