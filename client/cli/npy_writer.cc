#include "client/cli/npy_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
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

}  // namespace ballast::client::cli
