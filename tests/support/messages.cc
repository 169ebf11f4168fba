#include "tests/support/messages.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"

namespace ballast {
namespace {

using Messages = std::map<std::string, std::vector<std::string>>;  // By Suite.Test.

// Of the component's folder: the compiler knows the test's source as tests/COMPONENT/... .
std::string PathOf(const testing::TestInfo& test) {
  const std::string source = test.file();
  const size_t tests = source.find("tests/");
  return absl::StrCat(source.substr(tests, source.find('/', tests + 6) - tests), "/messages.txt");
}

std::string Masked(absl::string_view message) {
  static const std::pair<std::regex, const char*> kMasks[] = {
      {std::regex(R"((127\.0\.0\.[0-9]+|\[::1\]):[0-9]+)"), "$1:PORT"},
      {std::regex(
           absl::StrCat("(/tmp/|/dev/shm/[a-z-]*-test|", testing::TempDir(), ")/?[A-Za-z0-9._-]+")),
       "/tmp/DIR"},
      {std::regex(R"(\b[0-9a-f]{32}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"), "UID"},
      {std::regex(R"(\.partial-[0-9a-f]+)"), ".partial-UID"},
      {std::regex(R"(\bprocess [0-9]+)"), "process PID"},
      // A job's bytes.
      {std::regex("(needed|needs|used|limit) [1-9][0-9]* bytes"), "$1 N bytes"},
      {std::regex("[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [0-9]{4} GMT"), "TIME"},
      {std::regex("\n"), "\\n"}};
  std::string masked(message);
  for (const auto& [mask, name] : kMasks) masked = std::regex_replace(masked, mask, name);
  return masked;
}

Messages Read(const std::string& path) {
  Messages messages;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t end = line.find(": ");
    if (end != std::string::npos) messages[line.substr(0, end)].push_back(line.substr(end + 2));
  }
  return messages;
}

// The lines of the test that runs, as they come; at its end it compares how many there are, or
// writes them.
class Golden : public testing::EmptyTestEventListener {
 public:
  static Golden& Get() {
    static Golden& golden = *new Golden;  // gtest deletes it.
    return golden;
  }

  testing::AssertionResult Take(std::string message) {
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    const std::string name = absl::StrCat(test.test_suite_name(), ".", test.name());
    taken_.push_back(std::move(message));
    if (updates_) return testing::AssertionSuccess();
    const std::vector<std::string>& golden = Of(PathOf(test))[name];
    const size_t line = taken_.size() - 1;
    if (line < golden.size() && golden[line] == taken_[line]) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "\nline " << taken_.size() << " of " << name << " in " << PathOf(test) << " is\n  "
           << (line < golden.size() ? golden[line] : "missing") << "\nand the message\n  "
           << taken_[line] << "\nIf it is right, run the test with BALLAST_UPDATE_GOLDEN=1.";
  }

  void OnTestEnd(const testing::TestInfo& test) override {
    const std::string name = absl::StrCat(test.test_suite_name(), ".", test.name());
    const std::vector<std::string> taken = std::exchange(taken_, {});
    if (!test.result()->Passed() || test.result()->Skipped()) return;
    const std::string path = PathOf(test);
    if (!updates_) {
      EXPECT_EQ(Of(path)[name].size(), taken.size())
          << path << " has other lines of " << name
          << "; run the test with BALLAST_UPDATE_GOLDEN=1";
      return;
    }
    Messages golden = Read(path);  // Anew: other tests of the component write it too.
    golden[name] = taken;
    std::ofstream file(path);
    for (const auto& [test_name, lines] : golden) {
      for (const std::string& line : lines) file << test_name << ": " << line << "\n";
    }
    EXPECT_TRUE(file.flush()) << path << " cannot be written; run the test from the root";
  }

 private:
  Golden() { testing::UnitTest::GetInstance()->listeners().Append(this); }
  Messages& Of(const std::string& path) {
    return files_.try_emplace(path, Read(path)).first->second;
  }

  const bool updates_ = std::getenv("BALLAST_UPDATE_GOLDEN") != nullptr;
  std::map<std::string, Messages> files_;
  std::vector<std::string> taken_;
};

}  // namespace

testing::AssertionResult Says(absl::string_view text) { return Golden::Get().Take(Masked(text)); }

testing::AssertionResult Refused(const absl::Status& status, absl::StatusCode code,
                                 absl::string_view reason) {
  // First, so that the lines after it stay those of the messages after it.
  const testing::AssertionResult golden = Says(status.message());
  if (status.code() == code && ReasonOf(status) == reason) return golden;
  return testing::AssertionFailure() << status << ", expected " << code << " " << reason;
}

}  // namespace ballast
