#include "cpu_optimizer_service/state/safetensors.h"

#include <libdeflate.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "payloads are written as they lie");

// 1 MiB of floats: what one read or write takes.
constexpr int64_t kBufferElements = 1 << 18;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // The format's own limit.

// CRC-32 as zlib has it (RFC 1952, section 8), nearly as fast as memory is read. `crc` is that of the
// bytes before these; there is at least one byte.
void AddTo(uint32_t& crc, absl::Span<const std::byte> bytes) {
  crc = libdeflate_crc32(crc, bytes.data(), bytes.size());
}

std::string Hex(uint32_t crc) { return absl::StrCat(absl::Hex(crc, absl::kZeroPad8)); }

// By type.
constexpr std::array kTypeNames = {"F32", "BF16", "F16", "I16", "I8", "U8"};

TensorType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return TensorType::kBF16;
    case DType::kFloat16:
      return TensorType::kF16;
    default:
      return TensorType::kF32;
  }
}

// Of floats.
DType DTypeOf(TensorType type) {
  if (type == TensorType::kF32) return DType::kFloat32;
  return type == TensorType::kBF16 ? DType::kBFloat16 : DType::kFloat16;
}

std::string MakeHeader(absl::Span<const TensorEntry> tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Ordered, so that tensors stand in the order of their offsets; json would sort them by name.
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const TensorEntry& tensor : tensors) {
    const int64_t end = offset + tensor.elements * SizeBytes(tensor.type);
    header[tensor.name] = {{"dtype", kTypeNames[static_cast<size_t>(tensor.type)]},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, end}}};
    offset = end;
  }
  // Names are bytes; invalid UTF-8 must not throw.
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  // The format allows blanks behind the header; so the data begin at a multiple of 8 bytes.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

absl::Status Narrow(absl::Span<const float> values, DType dtype, absl::Span<std::byte> to,
                    const TensorEntry& tensor, int64_t offset) {
  const auto elements = static_cast<int64_t>(values.size());
  ConvertFromFloat(values.data(), to.data(), dtype, elements);
  for (int64_t i = 0; i < elements; ++i) {
    if (!std::isfinite(values[i]) || std::isfinite(LoadElement(to.data(), dtype, i))) continue;
    return absl::FailedPreconditionError(absl::StrCat(tensor.name, " is ", values[i],
                                                      " at element ", offset + i, ", which ",
                                                      Name(dtype), " cannot represent; use fp32"));
  }
  return absl::OkStatus();
}

// nullopt: not one that is taken.
std::optional<TensorType> TypeOf(const json& name, SafetensorsFile::Take take) {
  const auto found = std::ranges::find(kTypeNames, name);
  if (found == kTypeNames.end()) return std::nullopt;
  const auto type = static_cast<TensorType>(found - kTypeNames.begin());
  const bool taken =
      take == SafetensorsFile::Take::kWeights ? type <= TensorType::kF16 : type != TensorType::kF16;
  return taken ? std::optional(type) : std::nullopt;
}

}  // namespace

int64_t SizeBytes(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return 4;
    case TensorType::kI8:
    case TensorType::kU8:
      return 1;
    default:
      return 2;
  }
}

absl::StatusOr<WrittenFile> WriteTensors(
    FileSystem& file_system, const std::string& path, absl::Span<const TensorEntry> tensors,
    absl::FunctionRef<absl::Status(int tensor, int64_t offset, absl::Span<std::byte> out)> read,
    const std::map<std::string, std::string>& metadata) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, file_system.Create(path));
  WrittenFile written;
  uint32_t crc32 = 0;
  // The checksum is of what is handed to the file, and nothing is read back: what a disk makes of
  // it shows when it is loaded or verified.
  const auto append = [&](absl::Span<const std::byte> bytes) {
    written.size_bytes += static_cast<int64_t>(bytes.size());
    AddTo(crc32, bytes);
    return file->Append(bytes);
  };
  const std::string header = MakeHeader(tensors, metadata);
  const uint64_t header_bytes = header.size();
  BALLAST_RETURN_IF_ERROR(append(absl::MakeConstSpan(
      reinterpret_cast<const std::byte*>(&header_bytes), sizeof(header_bytes))));
  BALLAST_RETURN_IF_ERROR(append(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(header.data()), header.size())));
  // A tensor of any size goes through this one buffer, which is aligned for floats.
  std::vector<float> buffer(kBufferElements);
  const auto bytes =
      absl::MakeSpan(reinterpret_cast<std::byte*>(buffer.data()), buffer.size() * sizeof(float));
  for (int tensor = 0; tensor < static_cast<int>(tensors.size()); ++tensor) {
    const TensorEntry& entry = tensors[tensor];
    for (int64_t offset = 0; offset < entry.elements; offset += kBufferElements) {
      const int64_t elements = std::min(kBufferElements, entry.elements - offset);
      const auto piece = bytes.first(elements * SizeBytes(entry.type));
      BALLAST_RETURN_IF_ERROR(read(tensor, offset, piece));
      BALLAST_RETURN_IF_ERROR(append(piece));
    }
  }
  BALLAST_RETURN_IF_ERROR(file->Close());
  written.crc32 = Hex(crc32);
  return written;
}

absl::StatusOr<WrittenFile> WriteSafetensors(
    FileSystem& file_system, const std::string& path, absl::Span<const TensorEntry> tensors,
    absl::FunctionRef<void(int tensor, int64_t offset, absl::Span<float> out)> read,
    const SafetensorsStyle& style) {
  std::vector<TensorEntry> entries(tensors.begin(), tensors.end());
  for (TensorEntry& entry : entries) entry.type = TypeOf(style.dtype);
  std::vector<float> values;
  const auto narrow = [&](int tensor, int64_t offset, absl::Span<std::byte> out) {
    values.resize(out.size() / SizeBytes(style.dtype));
    read(tensor, offset, absl::MakeSpan(values));
    return Narrow(values, style.dtype, out, tensors[tensor], offset);
  };
  return WriteTensors(file_system, path, entries, narrow, style.metadata);
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(FileSystem& file_system,
                                                      const std::string& path,
                                                      int64_t most_header_bytes, Take take) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, file_system.Open(path));
  return Open(std::move(file), path, most_header_bytes, take);
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(std::unique_ptr<ReadableFile> file,
                                                      const std::string& path,
                                                      int64_t most_header_bytes, Take take) {
  SafetensorsFile result;
  result.file_ = std::move(file);
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(path, " is not a safetensors file: ", what));
  };
  const int64_t file_bytes = result.file_->size_bytes();
  uint64_t header_bytes = 0;
  if (file_bytes < static_cast<int64_t>(sizeof(header_bytes))) return damaged("too short");
  BALLAST_RETURN_IF_ERROR(result.file_->Read(
      0, absl::MakeSpan(reinterpret_cast<std::byte*>(&header_bytes), sizeof(header_bytes))));
  // Asked before memory for it is taken: eight damaged bytes can say any length.
  if (header_bytes > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - 8))) {
    return damaged("its header is longer than the file");
  }
  if (header_bytes > static_cast<uint64_t>(most_header_bytes)) {
    return damaged(absl::StrCat("its header has ", header_bytes, " bytes, expected at most ",
                                most_header_bytes));
  }
  std::string text(header_bytes, '\0');
  BALLAST_RETURN_IF_ERROR(result.file_->Read(
      8, absl::MakeSpan(reinterpret_cast<std::byte*>(text.data()), text.size())));
  const json header = json::parse(text, nullptr, /*allow_exceptions=*/false);
  // A text that is no JSON gives a value of no type, which is no object either.
  if (!header.is_object()) return damaged("its header is no JSON object");

  const int64_t data_begin = 8 + static_cast<int64_t>(header_bytes);
  result.data_begin_ = data_begin;
  const auto is_size = [](const json& value) {
    // It is converted to an int64.
    return value.is_number_unsigned() && value.get<uint64_t>() <= (uint64_t{1} << 62);
  };
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const json dtype_name = tensor.is_object() ? tensor.value("dtype", json()) : json();
    const std::optional<TensorType> type = TypeOf(dtype_name, take);
    if (!type.has_value()) {
      if (take == Take::kWeights && dtype_name.is_string()) continue;  // Of integers, say.
      return damaged(absl::StrCat("tensor ", name, " is of no type that state has"));
    }
    const json shape = tensor.value("shape", json());
    const json offsets = tensor.value("data_offsets", json());
    if (!shape.is_array() || !std::all_of(shape.begin(), shape.end(), is_size) ||
        !offsets.is_array() || offsets.size() != 2 ||
        !std::all_of(offsets.begin(), offsets.end(), is_size)) {
      return damaged(absl::StrCat("tensor ", name, " has no shape or offsets"));
    }
    Place place;
    place.entry = {
        .name = name, .shape = shape.get<std::vector<int64_t>>(), .elements = 1, .type = *type};
    for (const int64_t size : place.entry.shape) {
      if (__builtin_mul_overflow(place.entry.elements, size, &place.entry.elements)) {
        return damaged(absl::StrCat("tensor ", name, " is too large"));
      }
    }
    const int64_t begin = offsets[0].get<int64_t>();
    const int64_t end = offsets[1].get<int64_t>();
    const int64_t size = SizeBytes(*type);
    // Ours are aligned, which reading the file through counts on.
    const int64_t alignment = take == Take::kState ? size : 1;
    // Differences and a division, since sums and a product of numbers from a file could overflow.
    if (begin > end || end > file_bytes - data_begin || begin % alignment != 0 ||
        (end - begin) % size != 0 || (end - begin) / size != place.entry.elements) {
      return damaged(absl::StrCat("the offsets of tensor ", name, " do not fit"));
    }
    place.begin = data_begin + begin;
    result.tensors_.emplace(name, std::move(place));
  }
  int64_t behind = data_begin;
  for (const Place* place : result.InOrder()) {
    // Examine looks at each byte once.
    if (take == Take::kState && place->begin < behind) {
      return damaged(absl::StrCat("tensor ", place->entry.name, " overlaps another one"));
    }
    behind = place->begin + place->entry.elements * SizeBytes(place->entry.type);
  }
  return result;
}

const TensorEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second.entry;
}

absl::Status SafetensorsFile::ReadBytes(const std::string& name, int64_t offset,
                                        absl::Span<std::byte> out) const {
  const Place& place = tensors_.at(name);
  const int64_t size = SizeBytes(place.entry.type);
  const auto elements = static_cast<int64_t>(out.size()) / size;
  if (offset < 0 || elements > place.entry.elements - offset) {
    return absl::OutOfRangeError(absl::StrCat("tensor ", name, " has ", place.entry.elements,
                                              " elements, asked for ", elements, " from ", offset));
  }
  return file_->Read(place.begin + offset * size, out);
}

absl::Status SafetensorsFile::Read(const std::string& name, int64_t offset,
                                   absl::Span<float> out) const {
  const TensorType type = tensors_.at(name).entry.type;
  if (type == TensorType::kF32) {
    return ReadBytes(
        name, offset,
        absl::MakeSpan(reinterpret_cast<std::byte*>(out.data()), out.size() * sizeof(float)));
  }
  std::vector<std::byte> read(out.size() * SizeBytes(type));
  BALLAST_RETURN_IF_ERROR(ReadBytes(name, offset, absl::MakeSpan(read)));
  ConvertToFloat(read.data(), DTypeOf(type), out.data(), static_cast<int64_t>(out.size()));
  return absl::OkStatus();
}

std::vector<const SafetensorsFile::Place*> SafetensorsFile::InOrder() const {
  std::vector<const Place*> places;
  for (const auto& [name, place] : tensors_) places.push_back(&place);
  std::sort(places.begin(), places.end(), [](const Place* a, const Place* b) {
    return std::pair(a->begin, a->entry.elements) < std::pair(b->begin, b->entry.elements);
  });
  return places;
}

absl::StatusOr<SafetensorsFile::Contents> SafetensorsFile::Examine(bool negative_is_bad) const {
  Contents contents;
  uint32_t crc32 = 0;
  // Comparisons alone, which are false for NaN: so one loop without branches looks at all values,
  // and only where one is bad the next loop looks for it.
  constexpr float kLargest = std::numeric_limits<float>::max();
  const float least = negative_is_bad ? 0.0f : -kLargest;
  const auto is_good = [least](float value) { return value >= least && value <= kLargest; };
  const std::vector<const Place*> places = InOrder();
  std::vector<float> buffer(kBufferElements);
  const auto buffer_bytes = static_cast<int64_t>(buffer.size() * sizeof(float));
  size_t first = 0;  // The first of `places` that does not end before the piece.
  for (int64_t offset = 0; offset < file_->size_bytes();) {
    // The header by itself, so that elements lie in the buffer as they are aligned in the data.
    const int64_t end = offset < data_begin_ ? data_begin_ : file_->size_bytes();
    const int64_t bytes = std::min(buffer_bytes, end - offset);
    const auto piece = absl::MakeSpan(reinterpret_cast<std::byte*>(buffer.data()), bytes);
    BALLAST_RETURN_IF_ERROR(file_->Read(offset, piece));
    AddTo(crc32, piece);
    for (size_t i = first; i < places.size() && places[i]->begin < offset + bytes; ++i) {
      const TensorEntry& entry = places[i]->entry;
      const int64_t size = SizeBytes(entry.type);
      const int64_t behind = places[i]->begin + entry.elements * size;
      if (behind <= offset && i == first) ++first;
      if (contents.bad.has_value() || entry.type != TensorType::kF32) continue;
      const int64_t begin = std::max(places[i]->begin, offset);
      const int64_t elements = (std::min(behind, offset + bytes) - begin) / size;
      const auto* const values = reinterpret_cast<const float*>(piece.data() + (begin - offset));
      bool all_good = true;
      for (int64_t e = 0; e < elements; ++e) all_good &= is_good(values[e]);  // No NaN is.
      if (all_good) continue;
      const float* const bad = std::find_if_not(values, values + elements, is_good);
      contents.bad = Element{.tensor = entry.name,
                             .element = (begin - places[i]->begin) / size + (bad - values),
                             .value = *bad};
    }
    offset += bytes;
    Progress::OfThisThread().Count(bytes);
  }
  contents.crc32 = Hex(crc32);
  return contents;
}

}  // namespace ballast
