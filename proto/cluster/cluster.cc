#include "proto/cluster/cluster.h"

#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/message_json.h"

namespace ballast::cluster {
namespace {

constexpr char kScheme[] = "etcd://";
constexpr char kServices[] = "services";
constexpr char kJobs[] = "jobs";

std::string Nonce() {
  std::random_device random;
  return absl::StrCat(absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8),
                      absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
}

absl::Status Parse(const Etcd::Entry& entry, google::protobuf::Message& message) {
  const absl::Status parsed = proto::FromJson(entry.value, message);
  if (parsed.ok()) return parsed;
  return absl::DataLossError(absl::StrCat("etcd's key ", entry.key, " is not Ballast's (",
                                          parsed.message(), "); give a prefix of its own"));
}

absl::StatusOr<Cluster::Record> ToRecord(const Etcd::Entry& entry, int64_t now) {
  Cluster::Record record = {
      .job = {}, .revision = entry.revision, .lease = entry.lease, .now = now};
  BALLAST_RETURN_IF_ERROR(Parse(entry, record.job));
  return record;
}

}  // namespace

bool IsAddress(absl::string_view text) { return absl::StartsWith(text, kScheme); }

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "': ", why,
                     "; expected etcd://HOST:PORT/PREFIX, such as etcd://a:2379/ballast"));
  };
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, kScheme)) return wrong("it is not an address of etcd");
  Address address;
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, absl::MaxSplits('?', 1));
  if (parts.size() == 2) {
    absl::string_view members = parts[1];
    const bool is_known = absl::ConsumePrefix(&members, "members=");
    if (members == "all") {
      address.members = -1;
    } else if (!is_known || !absl::SimpleAtoi(members, &address.members) || address.members < 1) {
      return wrong("behind '?' stands members=NUMBER or members=all");
    }
  }
  const size_t slash = parts[0].find('/');
  const absl::string_view prefix =
      slash == absl::string_view::npos ? "" : absl::StripSuffix(parts[0].substr(slash), "/");
  if (prefix.size() < 2) return wrong("it has no prefix, under which keys of Ballast alone lie");
  address.prefix = std::string(prefix);
  absl::StatusOr<std::vector<std::string>> endpoints = ParseServices(parts[0].substr(0, slash));
  if (!endpoints.ok()) return wrong(endpoints.status().message());
  for (const std::string& endpoint : *endpoints) {
    if (!absl::StrContains(endpoint, ':')) return wrong("an endpoint has no port");
  }
  address.endpoints = *std::move(endpoints);
  return address;
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Open(const Address& address,
                                                       const Etcd::Access& access) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<Etcd> etcd, Etcd::Create(address.endpoints, access));
  return std::unique_ptr<Cluster>(new Cluster(address, std::move(etcd)));
}

Cluster::Cluster(Address address, std::unique_ptr<Etcd> etcd)
    : address_(std::move(address)),
      etcd_(std::move(etcd)),
      name_(absl::StrCat("etcd at ", etcd_->name(), ", under ", address_.prefix)) {}

std::string Cluster::KeyOf(absl::string_view folder, absl::string_view name) const {
  return absl::StrCat(address_.prefix, "/", folder, "/", name);
}

absl::Status Cluster::Check() {
  BALLAST_ASSIGN_OR_RETURN(const Etcd::Listing all,
                           etcd_->List(absl::StrCat(address_.prefix, "/")));
  for (const Etcd::Entry& entry : all.entries) {
    v1::ClusterService service;
    v1::ClusterJob job;
    const bool is_ours =
        absl::StartsWith(entry.key, KeyOf(kServices, ""))
            ? Parse(entry, service).ok()
            : absl::StartsWith(entry.key, KeyOf(kJobs, "")) && Parse(entry, job).ok();
    if (is_ours) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "etcd's key ", entry.key, " is not Ballast's; give the cluster a prefix of its own"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Cluster::Service>> Cluster::Services() {
  BALLAST_ASSIGN_OR_RETURN(const Etcd::Listing all, etcd_->List(KeyOf(kServices, "")));
  std::vector<Service> services;
  for (const Etcd::Entry& entry : all.entries) {
    Service service = {.service = {}, .revision = entry.revision};
    if (Parse(entry, service.service).ok()) services.push_back(std::move(service));
  }
  return services;
}

absl::StatusOr<Cluster::Service> Cluster::FindService(const std::string& address) {
  BALLAST_ASSIGN_OR_RETURN(const Etcd::Listing found, etcd_->Get(KeyOf(kServices, address)));
  if (found.entries.empty()) return Service();
  Service service = {.service = {}, .revision = found.entries[0].revision};
  BALLAST_RETURN_IF_ERROR(Parse(found.entries[0], service.service));
  return service;
}

absl::StatusOr<int64_t> Cluster::PutService(const Service& service, int64_t lease) {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, proto::ToJson(service.service));
  return etcd_->PutIf(KeyOf(kServices, service.service.address()), service.revision, text, lease);
}

absl::StatusOr<std::vector<Cluster::Record>> Cluster::Jobs() {
  BALLAST_ASSIGN_OR_RETURN(const Etcd::Listing all, etcd_->List(KeyOf(kJobs, "")));
  std::vector<Record> records;
  for (const Etcd::Entry& entry : all.entries) {
    absl::StatusOr<Record> record = ToRecord(entry, all.revision);
    if (record.ok()) records.push_back(*std::move(record));
  }
  return records;
}

absl::StatusOr<Cluster::Record> Cluster::FindJob(const std::string& name) {
  BALLAST_ASSIGN_OR_RETURN(const Etcd::Listing found, etcd_->Get(KeyOf(kJobs, name)));
  if (!found.entries.empty()) return ToRecord(found.entries[0], found.revision);
  Record none;
  none.job.set_name(absl::StrCat("jobs/", name));
  none.now = found.revision;
  return none;
}

absl::StatusOr<int64_t> Cluster::PutJob(Record record, int64_t lease) {
  record.job.set_nonce(Nonce());
  BALLAST_ASSIGN_OR_RETURN(const std::string text, proto::ToJson(record.job));
  const absl::string_view name = absl::StripPrefix(record.job.name(), "jobs/");
  return etcd_->PutIf(KeyOf(kJobs, name), record.revision, text, lease);
}

absl::Status Cluster::DeleteJob(const Record& record) {
  const absl::string_view name = absl::StripPrefix(record.job.name(), "jobs/");
  return etcd_->DeleteIf(KeyOf(kJobs, name), record.revision);
}

}  // namespace ballast::cluster
