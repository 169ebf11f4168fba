#include "client/cli/npy.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client::cli {

std::string NpyHeader(absl::Span<const int64_t> shape) {
  // numpy.lib.format describes it: the dictionary is Python source.
  std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
  // A tuple of one element has a comma behind it: "(768,)".
  for (size_t i = 0; i < shape.size(); ++i) {
    absl::StrAppend(&dictionary, i == 0 ? "" : " ", shape[i],
                    shape.size() == 1 || i + 1 < shape.size() ? "," : "");
  }
  absl::StrAppend(&dictionary, "), }");
  constexpr size_t kPrefixBytes = 10;  // Magic, version and length.
  // 1 for the newline that ends the header. NumPy wants the data at a multiple of 64 bytes.
  const size_t unpadded = kPrefixBytes + dictionary.size() + 1;
  dictionary.append((64 - unpadded % 64) % 64, ' ');
  dictionary.push_back('\n');
  // The length is given, since the text has a zero byte. Version 1.0 has two bytes for the header's
  // length, the lower one first.
  std::string header("\x93NUMPY\x01\x00", 8);
  header.push_back(static_cast<char>(dictionary.size() & 0xff));
  header.push_back(static_cast<char>(dictionary.size() >> 8));
  return header + dictionary;
}

absl::StatusOr<std::unique_ptr<NpyWriter>> NpyWriter::Create(std::string path,
                                                             absl::Span<const int64_t> shape) {
  int64_t data_bytes = sizeof(float);
  for (int64_t extent : shape) data_bytes *= extent;
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<AtomicFile> file, CreateOutputFile(std::move(path)));
  BALLAST_RETURN_IF_ERROR(file->Append(NpyHeader(shape)));
  return std::unique_ptr<NpyWriter>(new NpyWriter(std::move(file), data_bytes));
}

absl::Status NpyWriter::Append(std::string_view bytes) {
  appended_bytes_ += static_cast<int64_t>(bytes.size());
  return file_->Append({bytes.data(), bytes.size()});
}

absl::Status NpyWriter::Commit() {
  if (appended_bytes_ != data_bytes_) {
    return absl::DataLossError(absl::StrCat("got ", appended_bytes_, " bytes for ", file_->path(),
                                            ", expected ", data_bytes_, "; nothing was written"));
  }
  return file_->Commit();
}

absl::StatusOr<NpyReader> NpyReader::Open(const std::string& path) {
  NpyReader reader(path);
  if (!reader.file_) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  BALLAST_RETURN_IF_ERROR(reader.ReadHeader());
  return reader;
}

absl::Status NpyReader::ReadHeader() {
  const absl::Status other = absl::InvalidArgumentError(
      absl::StrCat(path_, " is not a .npy file of fp32 in C order; write it with numpy.save(\"",
                   path_, "\", numpy.ascontiguousarray(array, numpy.float32))"));
  // Magic, a version of two bytes, and the header's length in two bytes, or four from version 2 on.
  char prefix[12] = {};
  if (!file_.read(prefix, 10) || std::string_view(prefix, 6) != "\x93NUMPY") return other;
  const auto byte = [&](int at) { return static_cast<size_t>(static_cast<uint8_t>(prefix[at])); };
  size_t length = byte(8) | byte(9) << 8;
  if (byte(6) > 1) {
    if (!file_.read(prefix + 10, 2)) return other;
    length |= byte(10) << 16 | byte(11) << 24;
  }
  constexpr size_t kMostHeaderBytes = size_t{1} << 16;
  std::string header(std::min(length, kMostHeaderBytes), '\0');
  if (length > kMostHeaderBytes || !file_.read(header.data(), header.size())) return other;
  const std::string kShape = "'shape': (";
  const size_t begin = header.find(kShape);
  const size_t end = header.find(')', begin);
  if (!absl::StrContains(header, "'descr': '<f4'") ||
      !absl::StrContains(header, "'fortran_order': False") || end == std::string::npos) {
    return other;
  }
  const std::string extents = header.substr(begin + kShape.size(), end - begin - kShape.size());
  left_bytes_ = sizeof(float);
  for (const absl::string_view part : absl::StrSplit(extents, ',', absl::SkipWhitespace())) {
    int64_t extent = 0;
    if (!absl::SimpleAtoi(part, &extent)) return other;
    if (__builtin_mul_overflow(left_bytes_, extent, &left_bytes_)) return other;
    shape_.push_back(extent);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> NpyReader::Read(size_t most) {
  std::string bytes(std::min<int64_t>(left_bytes_, static_cast<int64_t>(most)), '\0');
  if (!bytes.empty() && !file_.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    return absl::DataLossError(
        absl::StrCat(path_, " ends ", left_bytes_ - file_.gcount(), " bytes too early"));
  }
  left_bytes_ -= static_cast<int64_t>(bytes.size());
  return bytes;
}

}  // namespace ballast::client::cli
