#include "proto/cluster/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <memory>
#include <string>

#include "tests/proto/cluster/fake_etcd.h"
#include "tests/support/messages.h"

namespace ballast::cluster {
namespace {

using testing::ElementsAre;

constexpr char kNobody[] = "127.0.0.1:1";

std::unique_ptr<Cluster> Open(const std::string& endpoints, const Etcd::Access& access = {}) {
  return Cluster::Open(ParseAddress("etcd://" + endpoints + "/ballast").value(), access).value();
}

Cluster::Record RecordOf(const std::string& uid, int64_t revision = 0) {
  Cluster::Record record;
  record.job.set_name("jobs/gpt");
  record.job.set_uid(uid);
  record.revision = revision;
  return record;
}

TEST(ClusterAddress, HasEndpointsAPrefixAndANumberOfMembers) {
  const Address address = ParseAddress("etcd://a:2379,b:2379/team/ballast/").value();
  EXPECT_THAT(address.endpoints, ElementsAre("a:2379", "b:2379"));
  EXPECT_EQ(address.prefix, "/team/ballast");
  EXPECT_EQ(address.members, 0);
  EXPECT_EQ(ParseAddress("etcd://a:1/p?members=3").value().members, 3);
  EXPECT_EQ(ParseAddress("etcd://a:1/p?members=all").value().members, -1);
}

TEST(ClusterAddress, IsRefusedWhereItIsWrong) {
  for (const char* wrong :
       {"a:2379/ballast", "etcd://a:2379", "etcd://a:2379/", "etcd:///ballast", "etcd://a/ballast",
        "etcd://a:1,a:1/p", "etcd://a:1/p?members=0", "etcd://a:1/p?member=2"}) {
    EXPECT_TRUE(Refused(ParseAddress(wrong), absl::StatusCode::kInvalidArgument)) << wrong;
  }
}

TEST(ClusterRecords, AreWrittenOnlyOverWhatWasRead) {
  FakeEtcd etcd;
  const auto cluster = Open(etcd.address());
  const int64_t first = cluster->PutJob(RecordOf("a")).value();
  EXPECT_TRUE(absl::IsAborted(cluster->PutJob(RecordOf("b")).status()));
  const int64_t second = cluster->PutJob(RecordOf("c", first)).value();
  EXPECT_TRUE(absl::IsAborted(cluster->PutJob(RecordOf("d", first)).status()));
  const Cluster::Record found = cluster->FindJob("gpt").value();
  EXPECT_EQ(found.job.uid(), "c");
  EXPECT_EQ(found.revision, second);
  EXPECT_TRUE(absl::IsAborted(cluster->DeleteJob(RecordOf("", first))));
  EXPECT_TRUE(cluster->DeleteJob(found).ok());
  EXPECT_EQ(cluster->FindJob("gpt").value().revision, 0);
}

// Whoever asks again at the next endpoint finds its own write by the nonce, and nobody else's.
TEST(ClusterRecords, AreKnownAgainAfterALostAnswer) {
  FakeEtcd etcd;
  const auto cluster =
      Open(absl::StrCat(etcd.address(), ",", "localhost", etcd.address().substr(9)));
  etcd.LoseNextAnswer();
  const absl::StatusOr<int64_t> written = cluster->PutJob(RecordOf("a"));
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(cluster->FindJob("gpt").value().revision, *written);
  etcd.LoseNextAnswer();
  EXPECT_TRUE(absl::IsAborted(cluster->PutJob(RecordOf("a")).status()));
}

TEST(ClusterEndpoints, AreTriedInTurn) {
  FakeEtcd etcd;
  const auto cluster = Open(absl::StrCat(kNobody, ",", etcd.address()));
  EXPECT_TRUE(cluster->PutJob(RecordOf("a")).ok());
  EXPECT_TRUE(absl::IsUnavailable(Open(kNobody)->Jobs().status()));
}

TEST(ClusterLeases, EndWithTheirKeys) {
  FakeEtcd etcd;
  const auto cluster = Open(etcd.address());
  const int64_t lease = cluster->etcd().Grant(absl::Seconds(15)).value();
  ASSERT_TRUE(cluster->PutJob(RecordOf(""), lease).ok());
  EXPECT_EQ(cluster->FindJob("gpt").value().lease, lease);
  EXPECT_TRUE(cluster->etcd().KeepAlive(lease).ok());
  etcd.EndLease(lease);
  EXPECT_TRUE(absl::IsNotFound(cluster->etcd().KeepAlive(lease)));
  EXPECT_EQ(cluster->FindJob("gpt").value().revision, 0);
  EXPECT_TRUE(absl::IsNotFound(cluster->PutJob(RecordOf(""), lease).status()));
}

TEST(ClusterKeys, OfOthersAreTold) {
  FakeEtcd etcd;
  const auto cluster = Open(etcd.address());
  ASSERT_TRUE(cluster->PutJob(RecordOf("a")).ok());
  EXPECT_TRUE(cluster->Check().ok());
  ASSERT_TRUE(cluster->etcd().PutIf("/ballast/jobs/x", 0, "not JSON").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(cluster->Check()));
  EXPECT_TRUE(absl::IsDataLoss(cluster->FindJob("x").status()));
  EXPECT_EQ(cluster->Jobs().value().size(), 1u);
}

TEST(ClusterUser, GetsAnotherTokenWhenOneEnds) {
  FakeEtcd etcd;
  etcd.AsksForTokens("secret", /*calls=*/2);
  const std::string file = testing::TempDir() + "/etcd-password";
  std::ofstream(file) << "secret\n";
  chmod(file.c_str(), 0600);
  EXPECT_TRUE(absl::IsPermissionDenied(Open(etcd.address())->Jobs().status()));
  const auto cluster = Open(etcd.address(), {.user = "root", .password_file = file});
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(cluster->Jobs().ok());
  EXPECT_EQ(etcd.tokens(), 3);
  std::ofstream(file) << "wrong\n";
  const auto other = Open(etcd.address(), {.user = "root", .password_file = file});
  EXPECT_TRUE(absl::IsPermissionDenied(other->Jobs().status()));
  EXPECT_TRUE(Refused(Etcd::Create({"a:1"}, {.user = "root"}).status(),
                      absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ballast::cluster
