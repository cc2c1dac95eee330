// MessagePack, as far as messages use it: no extension types. Integers beyond 2^53 are BigInts on the way in.
"use strict";

const MAX_ELEMENTS = 65536;
const MAX_DEPTH = 32;

function head(byte, width, value) {
  const out = Buffer.alloc(1 + width);
  out[0] = byte;
  if (width === 8) out.writeBigUInt64BE(BigInt.asUintN(64, BigInt(value)), 1);
  else if (width) out.writeUIntBE(value, 1, width);
  return out;
}

function sized(length, widths) { // widths: [first byte, bytes of the length], the narrowest first
  const [byte, width] = widths.find(([, bytes]) => length < 2 ** (8 * bytes));
  return head(byte, width, length);
}

function integer(value) {
  if (value >= 0) return value < 128 ? Buffer.from([Number(value)]) : head(0xcf, 8, value);
  return head(0xd3, 8, value);
}

function encode(value) {
  if (value === null) return Buffer.from([0xc0]);
  if (value === false || value === true) return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "bigint" || Number.isSafeInteger(value)) return integer(value);
  if (typeof value === "number") {
    const out = head(0xcb, 8, 0);
    out.writeDoubleBE(value, 1);
    return out;
  }
  if (typeof value === "string") {
    const bytes = Buffer.from(value, "utf8");
    return Buffer.concat([sized(bytes.length, [[0xd9, 1], [0xda, 2], [0xdb, 4]]), bytes]);
  }
  if (Buffer.isBuffer(value)) return Buffer.concat([sized(value.length, [[0xc4, 1], [0xc5, 2], [0xc6, 4]]), value]);
  if (Array.isArray(value)) {
    return Buffer.concat([sized(value.length, [[0xdc, 2], [0xdd, 4]]), ...value.map(encode)]);
  }
  throw new Error(`no MessagePack for a ${typeof value}`);
}

// The one value that these bytes are; throws at any others.
function decode(bytes) {
  let at = 0;

  function take(length) {
    if (length > bytes.length - at) throw new Error("it ends too early");
    at += length;
    return bytes.subarray(at - length, at);
  }

  const unsigned = (width) => (width === 8 ? narrow(take(8).readBigUInt64BE()) : take(width).readUIntBE(0, width));
  const signed = (width) => (width === 8 ? narrow(take(8).readBigInt64BE()) : take(width).readIntBE(0, width));
  const narrow = (big) => (Number.isSafeInteger(Number(big)) ? Number(big) : big);
  const text = (length) => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(take(length));

  function several(count, depth, one) {
    if (count > MAX_ELEMENTS || depth > MAX_DEPTH) throw new Error("too many elements");
    return Array.from({ length: count }, () => one(depth + 1));
  }

  const array = (count, depth) => several(count, depth, value);
  const map = (count, depth) => new Map(several(count, depth, (deeper) => [value(deeper), value(deeper)]));

  function value(depth) {
    const byte = take(1)[0];
    if (byte < 0x80) return byte;
    if (byte < 0x90) return map(byte & 15, depth);
    if (byte < 0xa0) return array(byte & 15, depth);
    if (byte < 0xc0) return text(byte & 31);
    if (byte >= 0xe0) return byte - 256;
    switch (byte) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return Buffer.from(take(unsigned(1 << (byte - 0xc4))));
      case 0xca: return take(4).readFloatBE();
      case 0xcb: return take(8).readDoubleBE();
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return unsigned(1 << (byte - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return signed(1 << (byte - 0xd0));
      case 0xd9: case 0xda: case 0xdb: return text(unsigned(1 << (byte - 0xd9)));
      case 0xdc: case 0xdd: return array(unsigned(2 << (byte - 0xdc)), depth);
      case 0xde: case 0xdf: return map(unsigned(2 << (byte - 0xde)), depth);
      default: throw new Error("an extension type");
    }
  }

  const whole = value(0);
  if (at !== bytes.length) throw new Error("more than one value");
  return whole;
}

module.exports = { encode, decode };
