#include "server/ballastd/service_log.h"

#include <gmock/gmock.h>
#include <spdlog/spdlog.h>

#include <string>

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Puts the logger back that other tests of this process have.
class ServiceLogTest : public testing::Test {
 protected:
  ~ServiceLogTest() override { spdlog::set_default_logger(before_); }

  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(ServiceLogTest, AnEntryIsOnePrintableLineOfABoundedSize) {
  const auto last_lines = StartLog("info");
  spdlog::warn("job {} is new", "a\n[ballastd] [info] audit: user:0 from nowhere\x1b[2K");
  spdlog::warn("job {} is new", std::string(size_t{1} << 20, 'n'));
  EXPECT_THAT(
      last_lines(),
      ElementsAre(AllOf(HasSubstr("[warning] "),
                        EndsWith("] job a\\x0a[ballastd] [info] audit: user:0 from nowhere\\x1b[2K "
                                 "is new\n")),
                  AllOf(SizeIs(testing::Lt(5000)), EndsWith("nnn...\n"))));
}

TEST_F(ServiceLogTest, HasTheLevelThatIsAskedFor) {
  const auto last_lines = StartLog("warning");
  spdlog::info("info");
  EXPECT_THAT(last_lines(), SizeIs(0));
}

}  // namespace
}  // namespace ballast::server
