// The binary's flags, configuration and access, and what it says in one line where they will not do.
#include <gmock/gmock.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/limits/processors.h"
#include "tests/support/certificates.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"
#include "tests/support/sanitizers.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// One line says why.
void ExpectEndsWith(Ballastd& service, int code) {
  EXPECT_EQ(service.ExitCode(), code);
  const std::string errors = service.Errors();
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  EXPECT_TRUE(Says(absl::StripSuffix(errors, "\n")));
}

TEST(Ballastd, TellsInOneLineWhatIsWrongWithItsFlags) {
  for (const char* flag :
       {"--no-such-flag", "--threads=many", "--threads=-1", "stray", "--memory-limit=20XB",
        "--memory-limit=128", "--forget-after=1h", "--log-level=loud", "--drain-seconds=-1",
        "--seal-deadline-seconds=nan", "--listen=", "--flagfile=x", "--shared-memory=yes",
        "--checkpoint-keep=0", "--checkpoint-keep-asked=-1", "--checkpoint-every=10min",
        "--checkpoint-every=often", "--state-dir=/proc/ballast", "--advertise=0.0.0.0:7070"}) {
    Ballastd service(BALLASTD_PATH, {flag});
    EXPECT_EQ(service.Address(), "") << flag;
    ExpectEndsWith(service, 2);
  }
}

// By address space alone: it is what gRPC, which never says that it got no thread, has too little of.
TEST(Ballastd, StartsOrSaysInOneLineThatItHasTooLittle) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer maps terabytes";
  bool was_too_little = false;
  for (const char* mebibytes : {"40", "60", "80", "120", "160", "240"}) {
    for (const char* holder : {"--holder=parent", "--holder=none"}) {
      const std::string limited = absl::StrCat("ulimit -v $((", mebibytes, " * 1024)); exec ",
                                               BALLASTD_PATH, " --listen=127.0.0.1:0 --threads=1 ",
                                               "--log-level=error ", holder, " \"$@\"");
      Ballastd service("/bin/sh", {"-c", limited, "sh"});
      if (!service.Address().empty()) continue;
      was_too_little = true;
      EXPECT_EQ(service.ExitCode(), 1) << mebibytes << " MiB, " << holder;
      const std::string errors = service.Errors();
      EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
      EXPECT_THAT(errors, HasSubstr("ulimit -v")) << mebibytes << " MiB, " << holder;
    }
  }
  EXPECT_TRUE(was_too_little);
}

TEST(Ballastd, SaysWhereItsNumberOfThreadsComesFrom) {
  std::thread([] {  // Bound, and what it starts as well.
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    const std::string bound = ProcessorsInAffinityMask().bound;
    Ballastd service(BALLASTD_PATH, {"--listen=127.0.0.1:0"});
    EXPECT_NE(service.Address(), "");
    service.Signal(SIGTERM);
    EXPECT_EQ(service.ExitCode(), 0);
    EXPECT_THAT(service.Errors(), HasSubstr(absl::StrCat(", 1 thread (", bound, "), kernel")));
  })
      .join();
}

// What a ballastd that ends by itself writes to standard output.
std::string OutputOf(std::vector<std::string> flags) {
  flags.insert(flags.begin(), BALLASTD_PATH);
  Process process(std::move(flags));
  EXPECT_EQ(process.ExitCode(), 0) << process.Errors();
  return process.Output();
}

TEST(Ballastd, ListsItsFlags) {
  const std::string output = OutputOf({"--help"});
  EXPECT_THAT(output, AllOf(HasSubstr("Where it listens:"), HasSubstr("--listen="),
                            HasSubstr("--shared-memory="), HasSubstr("--self-benchmark")));
  // Container runtimes kill after ten seconds.
  EXPECT_THAT(output, testing::ContainsRegex("bounded\\.[ \n]*\\([0-9]\\)"));
}

TEST(Ballastd, SaysWhichBuildItIs) {
  EXPECT_THAT(OutputOf({"--version"}),
              testing::MatchesRegex("ballastd [0-9]+\\.[0-9]+\\.[0-9]+ \\(build [^ ]+\\)\n"));
}

// A folder with files that say who may do what.
class BallastdAccessTest : public testing::Test {
 protected:
  BallastdAccessTest() : folder_("/tmp/ballastd_access." + std::to_string(getpid())) {
    std::filesystem::create_directories(folder_);
    const TestAuthority authority(folder_, "ca");
    authority.Issue("good", {.common_name = "good"});
    authority.Issue("other", {.common_name = "other"});
    authority.Issue("old", {.common_name = "old", .begin_seconds = -100, .end_seconds = -10});
    WritePrivateFile(File("tokens"), "# None yet.\n");
    WritePrivateFile(File("roles"), "viewer * *\n");
  }
  ~BallastdAccessTest() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name) const { return folder_ + "/" + name; }
  static void ExpectRefused(const std::vector<std::string>& flags) {
    Ballastd service(BALLASTD_PATH, flags);
    ASSERT_EQ(service.Address(), "") << "it takes " << flags.back();
    ExpectEndsWith(service, 2);
  }
  void ExpectTlsRefused(const std::string& certificate, const std::string& key) const {
    ExpectRefused(
        {"--listen=127.0.0.1:0", "--tls-cert=" + File(certificate), "--tls-key=" + File(key)});
  }

  // As --user takes it.
  static std::string Self() { return std::to_string(geteuid()); }

  const std::string folder_;
};

TEST_F(BallastdAccessTest, TellsInOneLineWhatIsWrongWithItsCertificates) {
  ExpectTlsRefused("gone.pem", "good.key");
  ExpectTlsRefused("good.pem", "other.key");
  ExpectTlsRefused("old.pem", "old.key");
  ExpectRefused({"--tls-cert=" + File("good.pem")});
  ExpectRefused({"--tls-client-ca=" + File("ca.pem")});
  ExpectRefused(
      {"--listen=0.0.0.0:0", "--tls-cert=" + File("good.pem"), "--tls-key=" + File("good.key")});
  std::filesystem::permissions(File("good.key"), std::filesystem::perms::others_read,
                               std::filesystem::perm_options::add);
  ExpectTlsRefused("good.pem", "good.key");
}

TEST_F(BallastdAccessTest, TellsInOneLineWhatIsWrongWithItsRolesAndTokens) {
  const std::string listen = "--listen=unix:" + File("socket");
  const std::string roles = "--roles-file=" + File("roles");
  const std::string tokens = "--tokens-file=" + File("tokens");
  ExpectRefused({listen, tokens});
  ExpectRefused({"--listen=127.0.0.1:0", roles});
  std::filesystem::permissions(File("tokens"), std::filesystem::perms::others_read,
                               std::filesystem::perm_options::add);
  ExpectRefused({listen, roles, tokens});
  WritePrivateFile(File("roles"), "admin * *\n");
  ExpectRefused({listen, roles});
  WritePrivateFile(File("tokens"), "");
  WritePrivateFile(File("roles"), "viewer * token:nobody\n");
  ExpectRefused({listen, roles, tokens});
  ExpectRefused({listen, roles});
}

TEST_F(BallastdAccessTest, TakesFlagsFromAFileTheEnvironmentAndTheCommandLine) {
  WritePrivateFile(File("config"),
                   "# Where\nlisten = 127.0.0.1:0\nthreads = 1\nmemory_limit = 1GiB\n"
                   "startup-benchmark = false\n");
  ASSERT_EQ(setenv("BALLASTD_CONFIG", File("config").c_str(), 1), 0);
  ASSERT_EQ(setenv("BALLASTD_THREADS", "3", 1), 0);
  ASSERT_EQ(setenv("BALLASTD_MEMORY_LIMIT", "3GiB", 1), 0);
  ASSERT_EQ(setenv("BALLASTD_SERVICE_HOST", "of Kubernetes, and no flag", 1), 0);
  Ballastd service(BALLASTD_PATH, {"--memory-limit=2GiB"});
  for (const char* name :
       {"BALLASTD_CONFIG", "BALLASTD_THREADS", "BALLASTD_MEMORY_LIMIT", "BALLASTD_SERVICE_HOST"}) {
    unsetenv(name);
  }
  EXPECT_THAT(service.Address(), HasSubstr("127.0.0.1:"));
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0);
  EXPECT_THAT(service.Errors(), HasSubstr("memory limit 2.00 GiB, 3 threads"));
}

TEST_F(BallastdAccessTest, ChecksItsConfiguration) {
  const auto expect_refused = [&](const std::string& contents) {
    WritePrivateFile(File("config"), contents);
    ExpectRefused({"--check-config", "--user=" + Self(), "--config=" + File("config")});
  };
  expect_refused("memroy-limit = 1GiB\n");
  expect_refused("\nthreads\n");
  expect_refused("threads = 1\nthreads = 2\n");
  expect_refused("threads = many\n");
  expect_refused("insecure =\n");
  expect_refused("config = other\n");
  ExpectRefused({"--config=" + File("gone")});
  WritePrivateFile(File("config"), "threads = 1\nlisten = unix:" + File("socket") +
                                       "\nroles-file = " + File("roles") + "\n");
  Ballastd service(BALLASTD_PATH,
                   {"--check-config", "--user=" + Self(), "--config=" + File("config")});
  EXPECT_EQ(service.Address(), "");
  EXPECT_EQ(service.ExitCode(), 0) << service.Errors();
  EXPECT_FALSE(std::filesystem::exists(File("socket")));
}

TEST_F(BallastdAccessTest, ChecksItsConfigurationAsTheUserThatItRunsAs) {
  ExpectRefused({"--check-config", "--user=nosuchuser"});
  ExpectRefused({"--user=nobody"});
  if (geteuid() != 0) GTEST_SKIP() << "only root becomes another user";
  const passwd* const nobody = getpwnam("nobody");
  ASSERT_NE(nobody, nullptr);
  const auto check = [&](const std::string& user, const std::string& flag) {
    Process process({BALLASTD_PATH, "--check-config", "--user=" + user, "--listen=127.0.0.1:0",
                     "--tls-cert=" + File("good.pem"), "--tls-key=" + File("good.key"), flag});
    return std::pair(process.ExitCode(), process.Output() + process.Errors());
  };
  const auto refused = [&](const std::string& what) {
    return testing::Pair(2, AllOf(HasSubstr("as the user nobody: "), HasSubstr(what)));
  };
  const auto is_good = testing::Pair(0, HasSubstr("are good"));
  std::filesystem::permissions(File("good.pem"), std::filesystem::perms(0644));
  const std::string roles = "--roles-file=" + File("roles");
  EXPECT_THAT(check(Self(), roles), is_good);
  EXPECT_THAT(check("nobody", roles), refused("good.key cannot be read: Permission denied"));
  ASSERT_EQ(chown(File("good.key").c_str(), 0, nobody->pw_gid), 0);
  std::filesystem::permissions(File("good.key"), std::filesystem::perms(0640));
  EXPECT_THAT(check("nobody", roles), refused("roles cannot be read: Permission denied"));
  // Of what it does not write to while it checks, too.
  const std::string mine = "--checkpoint-dir=" + File("mine");
  EXPECT_THAT(check("nobody", mine), refused("mine cannot be made in " + folder_));
  std::filesystem::create_directory(File("mine"));
  EXPECT_THAT(check("nobody", mine), refused("Permission denied"));
  ASSERT_EQ(chown(File("mine").c_str(), nobody->pw_uid, nobody->pw_gid), 0);
  EXPECT_THAT(check("nobody", mine), is_good);
  EXPECT_THAT(check("nobody", "--checkpoint-dir=" + File("mine/new")), is_good);
  EXPECT_FALSE(std::filesystem::exists(File("mine/new")));
  WritePrivateFile(File("config"), "threads = 1\n");
  EXPECT_THAT(check("nobody", "--config=" + File("config")),
              refused("config cannot be read: Permission denied"));
}

TEST(Ballastd, MeasuresItsHostAndExits) {
  const std::string output = OutputOf({"--self-benchmark", "--memory-limit=64MiB"});
  EXPECT_THAT(output, AllOf(HasSubstr("processors"), HasSubstr("memory traffic alone"),
                            HasSubstr("1 thread "), HasSubstr("Gparam/s")));
}

TEST(Ballastd, LogsWhatItsHostCanDoWhenItStarts) {
  Ballastd service(BALLASTD_PATH,
                   {"--listen=127.0.0.1:0", "--memory-limit=64MiB", "--startup-benchmark=true"});
  ASSERT_NE(service.Address(), "") << service.Errors();
  service.Signal(SIGTERM);
  EXPECT_EQ(service.ExitCode(), 0);
  EXPECT_THAT(service.Errors(), HasSubstr("Gparam/s"));
}

TEST(Ballastd, TellsInOneLineWhyItCannotListen) {
  Ballastd first(BALLASTD_PATH, {"--listen=127.0.0.1:0"});
  const std::string taken = first.Address();
  for (const auto& [address, code] :
       {std::pair(taken, 1), {std::string("0.0.0.0:0"), 2}, {std::string("nonsense"), 2}}) {
    Ballastd second(BALLASTD_PATH, {"--listen=" + address});
    EXPECT_EQ(second.Address(), "") << address;
    ExpectEndsWith(second, code);
  }
}

}  // namespace
}  // namespace ballast::server
