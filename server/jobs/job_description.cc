#include "server/jobs/job_description.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/v1/jobs.pb.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/field_count.h"
#include "proto/frame.h"

namespace ballast::server {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

struct DescriptionSize {
  int64_t bytes = 0;
  int64_t groups = 0;
  int64_t parameters = 0;
  int64_t partitions = 0;
  int64_t mesh_dims = 0;
  int64_t members = 0;
  std::string name;          // The request's own field 1, where that is a string,
  std::string uid;           // its field 4,
  std::string derived_from;  // and its field 10.

  // Null: `list` is none of those that are counted.
  int64_t* CountOf(int list) {
    if (list == v1::Job::kGroupsFieldNumber) return &groups;
    if (list == v1::Job::kParametersFieldNumber) return &parameters;
    if (list == v1::Job::kPartitionsFieldNumber) return &partitions;
    if (list == v1::Job::kMembersFieldNumber) return &members;
    return list == v1::Job::kMeshFieldNumber ? &mesh_dims : nullptr;
  }
};

constexpr int kCreateJobField = v1::CreateJobRequest::kJobFieldNumber;
constexpr int kAttachJobField = v1::AttachWorkerRequest::kJobFieldNumber;
constexpr int kNameField = v1::AttachWorkerRequest::kNameFieldNumber;
constexpr int kUidField = v1::AttachWorkerRequest::kUidFieldNumber;
constexpr int kDerivedFromField = v1::AttachWorkerRequest::kDerivedFromFieldNumber;
bool IsBytes(uint32_t tag) {
  return WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
}

bool MeasureJob(CodedInputStream& in, DescriptionSize& size) {
  uint32_t bytes = 0;
  if (!in.ReadVarint32(&bytes)) return false;
  // Lengths are signed 32-bit numbers to Protobuf.
  if (static_cast<int32_t>(bytes) < 0) return false;
  // A field that comes more than once is merged into one description, so all that come count
  // together, here and below.
  size.bytes += bytes;
  const CodedInputStream::Limit outer = in.PushLimit(static_cast<int>(bytes));
  while (const uint32_t tag = in.ReadTag()) {
    int64_t* const count = size.CountOf(WireFormatLite::GetTagFieldNumber(tag));
    if (count != nullptr) ++*count;
    if (!WireFormatLite::SkipField(&in, tag)) return false;
  }
  // The loop also ends at a tag of 0, which no message has.
  if (!in.ConsumedEntireMessage()) return false;
  in.PopLimit(outer);
  return true;
}

bool Measure(const grpc::ByteBuffer& bytes, int job_field, DescriptionSize& size) {
  grpc::ByteBuffer reader_of = bytes;  // Another reference to the same bytes.
  grpc::ProtoBufferReader reader(&reader_of);
  if (!reader.status().ok()) return false;
  CodedInputStream in(&reader);
  in.SetTotalBytesLimit(std::numeric_limits<int>::max());
  while (const uint32_t tag = in.ReadTag()) {
    const int field = WireFormatLite::GetTagFieldNumber(tag);
    if (IsBytes(tag) && field == job_field) {
      if (!MeasureJob(in, size)) return false;
    } else if (IsBytes(tag) &&
               (field == kNameField || field == kUidField || field == kDerivedFromField)) {
      uint32_t length = 0;
      if (!in.ReadVarint32(&length) || static_cast<int32_t>(length) < 0) return false;
      if (length > proto::kMaxRequestBytes) {
        if (!in.Skip(static_cast<int>(length))) return false;  // CheckRest refuses it.
      } else if (!in.ReadString(field == kNameField  ? &size.name
                                : field == kUidField ? &size.uid
                                                     : &size.derived_from,
                                static_cast<int>(length))) {
        return false;
      }
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return false;
    }
  }
  return in.ConsumedEntireMessage();
}

// proto/field_count.h, of the whole request.
int64_t FieldsOf(const grpc::ByteBuffer& bytes, const google::protobuf::Descriptor& type,
                 int64_t most) {
  grpc::ByteBuffer reader_of = bytes;
  grpc::ProtoBufferReader reader(&reader_of);
  return reader.status().ok() ? proto::CountFields(type, reader, most) : 0;
}

absl::Status NotA(absl::string_view message) {
  return WithReason(
      absl::InvalidArgumentError(
          absl::StrCat("the request is not a ballast.v1.", message, "; send one as in jobs.proto")),
      reason::kMalformedMessage);
}

// The request without its description has no more than others, which have none.
absl::Status CheckRest(const grpc::ByteBuffer& request, const DescriptionSize& size) {
  const int64_t bytes = static_cast<int64_t>(request.Length()) - size.bytes;
  if (bytes <= static_cast<int64_t>(proto::kMaxRequestBytes)) return absl::OkStatus();
  return WithReason(absl::InvalidArgumentError(absl::StrCat(
                        "the request has ", bytes, " bytes without its description, more than ",
                        proto::kMaxRequestBytes, "; send one as in jobs.proto")),
                    reason::kMalformedMessage);
}

// Several of each parameter, group and range that a job may have.
constexpr int64_t kMostFields = int64_t{1} << 22;

absl::Status TooMany(absl::string_view what, int64_t count, int64_t most) {
  return absl::InvalidArgumentError(absl::StrCat("the description has ", count, " ", what,
                                                 ", more than ", most, "; make several jobs"));
}

// As message, as JobSpec and in the job's tables; generous.
int64_t MostBytesToRead(const DescriptionSize& size, int64_t fields) {
  constexpr int64_t kBytesOfByte = 24;  // A dimension of one byte becomes eight, three times.
  constexpr int64_t kBytesOfField = 96;
  // Their fields are in the terms below.
  const int64_t known = size.parameters + size.groups + size.members + size.partitions;
  return kBytesOfByte * size.bytes + kBytesOfField * std::max<int64_t>(fields - known, 0) +
         1024 * (size.parameters + size.groups + size.members) + 256 * size.partitions;
}

// Ranges that another split of the same parameters might have.
int64_t MostRangesDescribing(const Job& job) {
  return 4096 + 4 * static_cast<int64_t>(job.layout().chunks().size());
}

// Those that a newer client may say more of each with, too.
int64_t MostFieldsDescribing(const Job& job) {
  const LayoutSpec& spec = job.spec().layout;
  return 4096 +
         8 * static_cast<int64_t>(job.spec().groups.size() + spec.parameters.size() +
                                  spec.mesh.size() + job.spec().members.size()) +
         2 * MostRangesDescribing(job);
}

// As bytes of a message; generous.
int64_t MostBytesDescribing(const Job& job) {
  const JobSpec& spec = job.spec();
  // Names may stand there in full.
  constexpr int64_t kFullName = 200;
  int64_t bytes = 4096;
  for (const GroupSpec& group : spec.groups) {
    bytes += kFullName + 256 + static_cast<int64_t>(group.name.size());
  }
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    bytes += kFullName + 64 + static_cast<int64_t>(parameter.name.size()) +
             11 * static_cast<int64_t>(parameter.shape.size()) +
             5 * static_cast<int64_t>(parameter.placements.size());
  }
  for (const MeshDim& dim : spec.layout.mesh) {
    bytes += kFullName + 64 + static_cast<int64_t>(dim.name.size());
  }
  // Another description may have other addresses.
  bytes += (kMaxAddressBytes + 64) * static_cast<int64_t>(spec.members.size());
  // The tag and the number of each, if they are not packed.
  bytes += 4 * static_cast<int64_t>(spec.homes.size());
  return bytes + 64 * MostRangesDescribing(job);
}

}  // namespace

absl::StatusOr<MemoryBudget::Reservation> RoomToRead(Engine& engine,
                                                     const grpc::ByteBuffer& create_request) {
  DescriptionSize size;
  if (!Measure(create_request, kCreateJobField, size)) return NotA("CreateJobRequest");
  BALLAST_RETURN_IF_ERROR(CheckRest(create_request, size));
  if (size.parameters > kMaxParameters) {
    return TooMany("parameters", size.parameters, kMaxParameters);
  }
  if (size.groups > kMaxGroups) return TooMany("groups", size.groups, kMaxGroups);
  if (size.partitions > kMaxChunks) return TooMany("partitions", size.partitions, kMaxChunks);
  if (size.mesh_dims > static_cast<int64_t>(kMaxDimensions)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the mesh has ", size.mesh_dims, " dimensions, more than ", kMaxDimensions, "; use fewer"));
  }
  if (size.members > static_cast<int64_t>(kMaxMembers)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the job has ", size.members, " members, more than ", kMaxMembers, "; use fewer"));
  }
  // This reads all bytes once more, so it comes after what is cheaper to refuse.
  const int64_t fields = FieldsOf(create_request, *v1::CreateJobRequest::descriptor(), kMostFields);
  if (fields > kMostFields) return TooMany("fields", fields, kMostFields);
  const int64_t bytes = MostBytesToRead(size, fields);
  if (bytes <= kSmallDescriptionBytes) return MemoryBudget::Reservation();
  return engine.Reserve(bytes, "reading the description of a job");
}

absl::StatusOr<JobToAttach> FindJobToAttach(const grpc::ByteBuffer& attach_request) {
  DescriptionSize size;
  if (!Measure(attach_request, kAttachJobField, size)) return NotA("AttachWorkerRequest");
  BALLAST_RETURN_IF_ERROR(CheckRest(attach_request, size));
  return JobToAttach{.name = std::move(size.name),
                     .uid = std::move(size.uid),
                     .derived_from = std::move(size.derived_from)};
}

absl::Status CheckAsLargeAs(const Job& job, const grpc::ByteBuffer& attach_request) {
  DescriptionSize size;
  if (!Measure(attach_request, kAttachJobField, size)) return NotA("AttachWorkerRequest");
  // Bounds for the parser alone. Whether it is the job's description is said by Job::Attach, which
  // names the first difference.
  const auto check = [&](absl::string_view what, int64_t there, int64_t here) {
    if (there <= here) return absl::OkStatus();
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "a worker describes job ", job.spec().name,
                          " differently: the number of ", what, " is ", here, " here and ", there,
                          " there (here: the service's job); train with the same description, or "
                          "save and close the job and load its checkpoint into a new one")),
                      reason::kOtherDescription);
  };
  const Layout& layout = job.layout();
  BALLAST_RETURN_IF_ERROR(check("groups", size.groups, layout.group_count()));
  BALLAST_RETURN_IF_ERROR(
      check("parameters", size.parameters, static_cast<int64_t>(layout.spec().parameters.size())));
  BALLAST_RETURN_IF_ERROR(
      check("members", size.members, static_cast<int64_t>(job.spec().members.size())));
  BALLAST_RETURN_IF_ERROR(
      check("partition ranges, at most,", size.partitions, MostRangesDescribing(job)));
  const int64_t most_fields = MostFieldsDescribing(job);
  const int64_t fields =
      FieldsOf(attach_request, *v1::AttachWorkerRequest::descriptor(), most_fields);
  BALLAST_RETURN_IF_ERROR(check("fields, at most,", fields, most_fields));
  return check("bytes, at most,", size.bytes, MostBytesDescribing(job));
}

}  // namespace ballast::server
