#include "cpu_optimizer_service/common/system/version.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

TEST(Version, NeighboursOfOneMajorVersionWorkTogether) {
  for (const absl::string_view client : {"1.3.0", "1.4.0", "1.4.9", "1.5.2"}) {
    const std::string agent = absl::StrCat("ballast/", client, " grpc-c++/1.51.1");
    EXPECT_TRUE(CheckClientVersion(agent, "1.4.1").ok()) << client;
  }
  for (const absl::string_view client : {"1.2.0", "1.6.0", "0.4.1", "2.4.1"}) {
    const std::string agent = absl::StrCat("ballast/", client, " grpc-c++/1.51.1");
    EXPECT_TRUE(Refused(CheckClientVersion(agent, "1.4.1"), absl::StatusCode::kFailedPrecondition))
        << client;
  }
}

TEST(Version, WhoSaysNoneIsNotChecked) {
  for (const absl::string_view agent :
       {"", "grpc-python/1.51.1", "ballast/", "ballast/new", "ballast/1", "ballast/-1.2"}) {
    EXPECT_TRUE(CheckClientVersion(agent, "1.4.1").ok()) << agent;
  }
  EXPECT_TRUE(CheckClientVersion(BallastUserAgent()).ok());
}

}  // namespace
}  // namespace ballast
