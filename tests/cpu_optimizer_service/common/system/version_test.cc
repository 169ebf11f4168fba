#include "cpu_optimizer_service/common/system/version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

TEST(Version, NeighboursOfOneMajorVersionWorkTogether) {
  for (const absl::string_view client : {"1.3.0", "1.4.0", "1.4.9", "1.5.2"}) {
    const std::string agent = absl::StrCat("ballast/", client, " grpc-c++/1.51.1");
    EXPECT_TRUE(CheckClientVersion(agent, "1.4.1").ok()) << client;
  }
  for (const absl::string_view client : {"1.2.0", "1.6.0", "0.4.1", "2.4.1"}) {
    const std::string agent = absl::StrCat("ballast/", client, " grpc-c++/1.51.1");
    const absl::Status refused = CheckClientVersion(agent, "1.4.1");
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << client;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("this client is of Ballast ", client,
                                       " and the service of 1.4.1, which do not work together")));
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
